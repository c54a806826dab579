"""Read tables of pairs, labelled texts and tagged words: .csv, tab-separated, .jsonl and aligned files.

The first line of a .csv file names the columns; that of a tab-separated file may do so. The names of columns are
compared without regard to case, and other columns, such as an id, are ignored. A .csv file is separated by commas,
semicolons or tabs; a cell in double quotes may contain the separator and line breaks.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

from monoblock.data.readers.records import CorpusKind, LabelledText, Pair, TaggedSentence
from monoblock.data.readers.text import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.errors import FileError

SEPARATORS = ",;\t"
MAX_CELL_LENGTH = 2**31 - 1
ColumnNames = Mapping[str, tuple[str, ...]]  # what is in a column: the names that it may have
LABEL_COLUMNS: ColumnNames = {
    "label": ("label", "labels", "class", "category", "sentiment", "target"),
    "text": ("text", "sentence", "sentence1", "premise", "review", "comment", "content"),
    "text_pair": ("text_pair", "sentence2", "hypothesis"),
}
PAIR_COLUMNS: ColumnNames = {
    "source": ("source", "src"),
    "target": ("target", "tgt"),
    "frequency": ("frequency", "count"),
}
TEXT_COLUMNS: ColumnNames = {"text": LABEL_COLUMNS["text"]}
REQUIRED_COLUMNS: dict[CorpusKind, ColumnNames] = {
    "labelled": {name: LABEL_COLUMNS[name] for name in ("label", "text")},
    "pairs": {name: PAIR_COLUMNS[name] for name in ("source", "target")},
    "text": TEXT_COLUMNS,
}


class TableRow(NamedTuple):
    number: int  # the line in the file
    cells: list[str]


def read_table(path: str | Path) -> Iterator[TableRow]:
    """Yield the rows of a .csv file or of a tab-separated file, without empty lines."""
    empty = True
    for row in _read_csv(path) if Path(path).suffix == ".csv" else _read_tab_separated(path):
        if any(cell.strip() for cell in row.cells):
            empty = False
            yield row
    if empty:
        raise empty_file_error(path)


def _read_csv(path: str | Path) -> Iterator[TableRow]:
    reader = _csv_reader(path)
    limit = csv.field_size_limit(MAX_CELL_LENGTH)  # a setting of the whole process, which is restored below
    try:
        rows = [TableRow(reader.line_num, cells) for cells in reader]
    except csv.Error as problem:
        raise FileError(f"{path}, line {reader.line_num}: not CSV ({problem}); check the double quotes") from None
    finally:
        csv.field_size_limit(limit)
    yield from rows


def _csv_reader(path: str | Path) -> Any:
    """Return a reader of csv; the separator is the most frequent of SEPARATORS in the first line that is not empty."""
    first = next((line for _, line in numbered_lines(path) if line.strip()), "")
    lines = (f"{line}\n" for _, line in numbered_lines(path))
    return csv.reader(lines, delimiter=max(SEPARATORS, key=first.count), strict=True)


def _read_tab_separated(path: str | Path) -> Iterator[TableRow]:
    return (TableRow(number, line.split("\t")) for number, line in numbered_lines(path))


# -- the names of columns ----------------------------------------------------------------------------------------------


def find_columns(header: Sequence[str], names: ColumnNames) -> dict[str, int]:
    """Return the index of each column that a header names; columns that it does not name are left out."""
    cells = [cell.strip().casefold() for cell in header]
    found = {what: next((name for name in known if name in cells), None) for what, known in names.items()}
    return {what: cells.index(name) for what, name in found.items() if name is not None}


def find_pair_columns(header: Sequence[str]) -> dict[str, int]:
    """Return the index of the columns of pairs that a header names; {} if it does not name a source and a target.

    If it names neither, but two languages, as in en<TAB>de, the first of them is the source.
    """
    found = find_columns(header, PAIR_COLUMNS)
    if found.keys() >= {"source", "target"}:
        return found
    languages = [index for index, cell in enumerate(header) if names_language(cell)]
    if len(languages) > 2:  # "id" and "no" are codes of languages, and names of columns with numbers
        languages = [index for index in languages if header[index].strip().casefold() not in ("id", "no")]
    differ = len({header[index].strip().casefold() for index in languages}) == len(languages) == 2
    if not differ or any(map(_is_count, header)):  # is source<TAB>target<TAB>frequency a row?
        return {}
    frequency = {name: index for name, index in found.items() if name == "frequency"}
    return {"source": languages[0], "target": languages[1]} | frequency


def header_kind(header: Sequence[str]) -> CorpusKind | None:
    """Return the kind of corpus whose columns a header names; None if it names neither labels nor pairs nor texts."""
    found = (kind for kind, names in REQUIRED_COLUMNS.items() if find_columns(header, names).keys() == names.keys())
    return next(found, "pairs" if find_pair_columns(header) else None)


def table_kind(path: str | Path) -> CorpusKind | None:
    """Return the kind of corpus in a table, if its first line says so; one column alone says it in .csv files only."""
    is_csv = Path(path).suffix == ".csv"
    rows = _csv_reader(path) if is_csv else (row.cells for row in _read_tab_separated(path))
    kind = header_kind(next((cells for cells in rows if any(map(str.strip, cells))), []))
    return None if kind == "text" and not is_csv else kind


def check_columns(path: str | Path, header: Sequence[str], kind: CorpusKind) -> None:
    """Raise FileError unless the header of a .csv file names the columns of a corpus of this kind."""
    if kind == "pairs" and find_pair_columns(header):
        return
    required = REQUIRED_COLUMNS[kind]
    missing = [name for name in required if name not in find_columns(header, required)]
    if missing:
        cells = ", ".join(cell.strip() for cell in header)
        raise FileError(
            f"{path}: the first line {cells!r:.60} has no column named {' or '.join(missing)}; "
            f"name the columns, as in {','.join(required)}"
        )


def check_width(path: str | Path, row: TableRow, header: Sequence[str]) -> None:
    """Raise FileError unless a row has as many cells as the header."""
    if len(row.cells) != len(header):
        columns = f"{len(row.cells)} column{'s' * (len(row.cells) != 1)}"
        raise FileError(
            f"{path}, line {row.number}: {columns}, but the first line names {len(header)}; "
            "put cells that contain a separator or a line break in double quotes"
        )


def _is_count(cell: str) -> bool:
    return cell.strip().isascii() and cell.strip().isdigit()


def is_number(label: object) -> bool:
    """Return whether a label is written as a number."""
    try:
        float(str(label))
    except ValueError:
        return False
    return True


# -- pairs and texts ---------------------------------------------------------------------------------------------------

POSITIONS = {"source": 0, "target": 1, "frequency": 2}  # of the columns of a file without a header
# The keys of source and target in a .jsonl file: our own, and those in Aksharantar (Madhani et al. 2023).
PAIR_KEYS = (("source", "target"), ("english word", "native word"))


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Yield the pairs of a .csv file, of a tab-separated file, or of a .jsonl or .json file with one object per line.

    The columns are the source, the target and optionally how often the pair was observed. The first line of a .csv file
    names them (source, target, frequency, or two languages), and so may that of a tab-separated file; where its names
    are other words than source and target, a warning says that they are not read as a pair. PAIR_KEYS lists the keys of
    the JSON objects.
    """
    if Path(path).suffix in (".jsonl", ".json"):
        for number, item in read_jsonl(path):
            keys = next((keys for keys in PAIR_KEYS if keys[0] in item), PAIR_KEYS[0])
            yield _make_pair(path, number, *(string_field(path, number, item, key).strip() for key in keys))
        return
    table = read_table(path)
    first, is_csv = next(table), Path(path).suffix == ".csv"
    if is_csv or header_kind(first.cells) == "labelled":
        check_columns(path, first.cells, "pairs")
    named, second = find_pair_columns(first.cells), next(table, None)
    if named:  # in other words than ours, two languages
        is_inferred = len(find_columns(first.cells, REQUIRED_COLUMNS["pairs"])) < len(REQUIRED_COLUMNS["pairs"])
    else:  # a word above counts
        has_counts = second is not None and len(second.cells) == len(POSITIONS) and _is_count(second.cells[-1])
        is_inferred = has_counts and len(first.cells) == len(POSITIONS) and not _is_count(first.cells[-1])
    if is_inferred and not is_csv:
        warn(
            f"{path}: the first line, {', '.join(map(str.strip, first.cells))!r:.60}, is read as names of columns; "
            "if it is a pair, write source<TAB>target above it",
            stacklevel=2,
        )
        named = named or POSITIONS
    rows = chain([] if named else [first], [] if second is None else [second], table)
    for row in rows:
        if named:
            check_width(path, row, first.cells)
        elif len(row.cells) not in (2, 3):
            raise column_error(path, row.number, len(row.cells), "source<TAB>target")
        columns = (named or POSITIONS).items()
        yield _make_pair(
            path, row.number, **{name: row.cells[index].strip() for name, index in columns if index < len(row.cells)}
        )


def _make_pair(path: str | Path, number: int, source: str, target: str, frequency: str = "1") -> Pair:
    if not _is_count(frequency):
        raise FileError(f"{path}, line {number}: the third column {frequency!r:.40} is not a count; write a number")
    if not (source and target):
        raise FileError(f"{path}, line {number}: one side of the pair is empty; fill it, or delete the line")
    return Pair(source, target, int(frequency))


def read_aligned_pairs(source: str | Path, target: str | Path) -> Iterator[Pair]:
    """Yield pairs from two files aligned line by line, such as train.de and train.en."""
    empty = True
    for source_line, target_line in zip_longest(numbered_lines(source), numbered_lines(target)):
        if source_line is None or target_line is None:
            short, number = (source, target_line[0]) if source_line is None else (target, source_line[0])
            raise FileError(
                f"{short} ends before line {number} of the other file; give files with the same number of lines"
            )
        left, right = source_line[1].strip(), target_line[1].strip()
        if bool(left) != bool(right):
            file = source if not left else target
            raise FileError(
                f"{file}, line {source_line[0]}: empty where the other file has text; fill both lines or neither"
            )
        if left:
            empty = False
            yield Pair(left, right)
    if empty:
        raise empty_file_error(source)


def read_documents(path: str | Path) -> Iterator[str]:
    """Yield the documents of a .jsonl or .csv file: the value of "text" in each object, or the column "text"."""
    if Path(path).suffix != ".csv":
        yield from (string_field(path, number, item, "text") for number, item in read_jsonl(path))
        return
    table = read_table(path)
    header = next(table).cells
    check_columns(path, header, "text")
    index = find_columns(header, TEXT_COLUMNS)["text"]
    for row in table:
        check_width(path, row, header)
        yield row.cells[index]


# -- texts with a class label ------------------------------------------------------------------------------------------

FORMATS = {2: "label<TAB>text", 3: "label<TAB>text<TAB>text"}  # number of columns: their meaning


def read_labelled(path: str | Path) -> Iterator[LabelledText]:
    """Yield the labelled texts of a .csv file, a tab-separated file or a .jsonl file.

    The first line of a .csv file names its columns: label, text and optionally text_pair, the second text. So may that
    of a tab-separated file; without such a line, its columns are the label, the text and optionally the second text.
    Objects of a .jsonl file have the keys "label", "text" and optionally "text_pair".
    """
    if Path(path).suffix == ".jsonl":
        for number, item in read_jsonl(path):
            text_pair = None if item.get("text_pair") is None else string_field(path, number, item, "text_pair")
            text, label = (string_field(path, number, item, name) for name in ("text", "label"))
            yield LabelledText(text, label, text_pair)
        return
    table = read_table(path)
    first = next(table)
    if Path(path).suffix == ".csv":
        check_columns(path, first.cells, "labelled")
    if header_kind(first.cells) == "labelled":
        columns = find_columns(first.cells, LABEL_COLUMNS)
        for row in table:
            check_width(path, row, first.cells)
            cells = {name: row.cells[index].strip() for name, index in columns.items()}
            yield LabelledText(cells["text"], _check_label(path, row.number, cells["label"]), cells.get("text_pair"))
        return
    rows, width = list[LabelledText](), 0
    for number, values in chain([first], table):
        if len(values) not in FORMATS or width not in (0, len(values)):
            raise column_error(path, number, len(values), FORMATS.get(width, " or ".join(FORMATS.values())))
        width = len(values)
        label, text, *pair = map(str.strip, values)
        rows.append(LabelledText(text, _check_label(path, number, label), *pair))
    if len(rows) > 2 and not is_number(rows[0].label) and all(is_number(row.label) for row in rows[1:]):
        raise FileError(
            f"{path}, line {first.number}: the label {rows[0].label!r:.40} is not a number, but all others are; "
            "if this line names the columns, call them label and text, or delete it"
        )
    yield from rows


def _check_label(path: str | Path, number: int, label: str) -> str:
    if not label:
        raise FileError(f"{path}, line {number}: the label is empty; fill it, or delete the line")
    return label


# -- tagged words, in the columns of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003) -----------------------

WORD_COLUMN_NAMES = ("word", "words", "token", "tokens", "form")
LABEL_COLUMN_NAMES = ("label", "labels", "tag", "tags", "ner", "ner_tag", "ner_tags", "pos", "upos")


def read_conll(path: str | Path) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file that has one word per line and a blank line between sentences.

    Columns are separated by white space; the first is the word and the last its label. A line that begins with
    -DOCSTART- separates sentences like a blank line, and begins a document. A first line that names the columns,
    such as "word label", is skipped.
    """
    words: list[str] = []
    labels: list[str] = []
    empty, columns, document = True, 0, 0
    for number, line in numbered_lines(path):
        cells = line.split()
        names = [cell.casefold() for cell in cells]
        if number == 1 and len(names) > 1 and names[0] in WORD_COLUMN_NAMES and names[-1] in LABEL_COLUMN_NAMES:
            continue
        if cells and cells[0] != "-DOCSTART-":
            columns = columns or len(cells)
            if len(cells) != columns or columns < 2:
                raise column_error(path, number, len(cells), f"word … label ({max(columns, 2)} columns)")
            words.append(cells[0])
            labels.append(cells[-1])
        elif words:
            empty = False
            yield TaggedSentence(tuple(words), tuple(labels), document)
            words, labels = [], []
        document += bool(cells) and cells[0] == "-DOCSTART-"
    if words:
        yield TaggedSentence(tuple(words), tuple(labels), document)
    elif empty:
        raise empty_file_error(path)


# -- names of languages in the header of a table -----------------------------------------------------------------------

# The languages of ISO 639-1: their codes of two and of three letters (ISO 639-2), and their names.
LANGUAGES = """
aa/aar/Afar, ab/abk/Abkhazian, ae/ave/Avestan, af/afr/Afrikaans, ak/aka/Akan, am/amh/Amharic, an/arg/Aragonese,
ar/ara/Arabic, as/asm/Assamese, av/ava/Avaric, ay/aym/Aymara, az/aze/Azerbaijani, ba/bak/Bashkir, be/bel/Belarusian,
bg/bul/Bulgarian, bi/bis/Bislama, bm/bam/Bambara, bn/ben/Bengali, bo/bod/tib/Tibetan, br/bre/Breton, bs/bos/Bosnian,
ca/cat/Catalan, ce/che/Chechen, ch/cha/Chamorro, co/cos/Corsican, cr/cre/Cree, cs/ces/cze/Czech,
cu/chu/Church Slavic, cv/chv/Chuvash, cy/cym/wel/Welsh, da/dan/Danish, de/deu/ger/German, dv/div/Divehi,
dz/dzo/Dzongkha, ee/ewe/Ewe, el/ell/gre/Modern Greek, en/eng/English, eo/epo/Esperanto, es/spa/Spanish,
et/est/Estonian, eu/eus/baq/Basque, fa/fas/per/Persian, ff/ful/Fulah, fi/fin/Finnish, fj/fij/Fijian, fo/fao/Faroese,
fr/fra/fre/French, fy/fry/Western Frisian, ga/gle/Irish, gd/gla/Scottish Gaelic, gl/glg/Galician, gn/grn/Guarani,
gu/guj/Gujarati, gv/glv/Manx, ha/hau/Hausa, he/heb/Hebrew, hi/hin/Hindi, ho/hmo/Hiri Motu, hr/hrv/Croatian,
ht/hat/Haitian, hu/hun/Hungarian, hy/hye/arm/Armenian, hz/her/Herero, ia/ina/Interlingua, id/ind/Indonesian,
ie/ile/Interlingue, ig/ibo/Igbo, ii/iii/Sichuan Yi, ik/ipk/Inupiaq, io/ido/Ido, is/isl/ice/Icelandic,
it/ita/Italian, iu/iku/Inuktitut, ja/jpn/Japanese, jv/jav/Javanese, ka/kat/geo/Georgian, kg/kon/Kongo,
ki/kik/Kikuyu, kj/kua/Kuanyama, kk/kaz/Kazakh, kl/kal/Kalaallisut, km/khm/Khmer, kn/kan/Kannada, ko/kor/Korean,
kr/kau/Kanuri, ks/kas/Kashmiri, ku/kur/Kurdish, kv/kom/Komi, kw/cor/Cornish, ky/kir/Kirghiz, la/lat/Latin,
lb/ltz/Luxembourgish, lg/lug/Ganda, li/lim/Limburgan, ln/lin/Lingala, lo/lao/Lao, lt/lit/Lithuanian,
lu/lub/Luba-Katanga, lv/lav/Latvian, mg/mlg/Malagasy, mh/mah/Marshallese, mi/mri/mao/Maori, mk/mkd/mac/Macedonian,
ml/mal/Malayalam, mn/mon/Mongolian, mr/mar/Marathi, ms/msa/may/Malay, mt/mlt/Maltese, my/mya/bur/Burmese,
na/nau/Nauru, nb/nob/Norwegian Bokmål, nd/nde/North Ndebele, ne/nep/Nepali, ng/ndo/Ndonga, nl/nld/dut/Dutch,
nn/nno/Norwegian Nynorsk, no/nor/Norwegian, nr/nbl/South Ndebele, nv/nav/Navajo, ny/nya/Chichewa, oc/oci/Occitan,
oj/oji/Ojibwa, om/orm/Oromo, or/ori/Oriya, os/oss/Ossetian, pa/pan/Panjabi, pi/pli/Pali, pl/pol/Polish,
ps/pus/Pushto, pt/por/Portuguese, qu/que/Quechua, rm/roh/Romansh, rn/run/Rundi, ro/ron/rum/Romanian, ru/rus/Russian,
rw/kin/Kinyarwanda, sa/san/Sanskrit, sc/srd/Sardinian, sd/snd/Sindhi, se/sme/Northern Sami, sg/sag/Sango,
sh/hbs/Serbo-Croatian, si/sin/Sinhala, sk/slk/slo/Slovak, sl/slv/Slovenian, sm/smo/Samoan, sn/sna/Shona,
so/som/Somali, sq/sqi/alb/Albanian, sr/srp/Serbian, ss/ssw/Swati, st/sot/Southern Sotho, su/sun/Sundanese,
sv/swe/Swedish, sw/swa/Swahili, ta/tam/Tamil, te/tel/Telugu, tg/tgk/Tajik, th/tha/Thai, ti/tir/Tigrinya,
tk/tuk/Turkmen, tl/tgl/Tagalog, tn/tsn/Tswana, to/ton/Tonga, tr/tur/Turkish, ts/tso/Tsonga, tt/tat/Tatar,
tw/twi/Twi, ty/tah/Tahitian, ug/uig/Uighur, uk/ukr/Ukrainian, ur/urd/Urdu, uz/uzb/Uzbek, ve/ven/Venda,
vi/vie/Vietnamese, vo/vol/Volapük, wa/wln/Walloon, wo/wol/Wolof, xh/xho/Xhosa, yi/yid/Yiddish, yo/yor/Yoruba,
za/zha/Zhuang, zh/zho/chi/Chinese, zu/zul/Zulu
"""
NAMES = frozenset(name.strip().casefold() for language in LANGUAGES.split(",") for name in language.split("/"))
NAMES |= {"greek", "odia", "punjabi", "norwegian"}
WORDS = {"source", "target", "src", "tgt", "language", "lang"}
WORDS |= {"text", "texts", "sentence", "sentences", "word", "words"}
REGION_OR_SCRIPT = re.compile(r"[A-Z]{2}|[A-Z][a-z]{3}|[0-9]{3}")  # as in pt_BR, hin_Deva and es-419


def names_language(cell: str) -> bool:
    """Return whether a cell is the name or the code of a language, alone or with words such as "text"."""
    if cell.strip().casefold() in NAMES:
        return True
    first, *rest = re.split(r"[\s_-]+", cell.strip())
    if rest and first.casefold() in WORDS:
        first, *rest = *rest, first
    others = all(part.casefold() in WORDS or REGION_OR_SCRIPT.fullmatch(part) for part in rest)
    return first.casefold() in NAMES and others
