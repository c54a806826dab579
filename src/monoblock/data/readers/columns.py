"""Read tables: .csv files, whose first line names the columns, and tab-separated files, whose first line may do so.

The names of columns are compared without regard to case, and other columns, such as an id, are ignored. A .csv file is
separated by commas, semicolons or tabs; a cell in double quotes may contain the separator and line breaks.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.data.readers.lines import empty_file_error, numbered_lines
from monoblock.data.readers.records import CorpusKind
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
    rows = read_csv(path) if Path(path).suffix == ".csv" else _read_tab_separated(path)
    empty = True
    for row in rows:
        if any(cell.strip() for cell in row.cells):
            empty = False
            yield row
    if empty:
        raise empty_file_error(path)


def read_csv(path: str | Path) -> Iterator[TableRow]:
    """Yield the rows of a .csv file."""
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
    if not differ or any(is_count(cell.strip()) for cell in header):  # is source<TAB>target<TAB>frequency a row?
        return {}
    return {"source": languages[0], "target": languages[1]} | {
        name: index for name, index in found.items() if name == "frequency"
    }


def is_count(cell: str) -> bool:
    return cell.isascii() and cell.isdigit()


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
NAMES = frozenset(name.strip().casefold() for language in LANGUAGES.split(",") for name in language.split("/")) | {
    "greek",
    "odia",
    "punjabi",
    "norwegian",
}
WORDS = {
    "text",
    "texts",
    "sentence",
    "sentences",
    "word",
    "words",
    "source",
    "target",
    "src",
    "tgt",
    "language",
    "lang",
}
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
