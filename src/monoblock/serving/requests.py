"""Request schemas: one class a route, with OpenAI's names, and the decoding settings that follow from it.

Unknown fields are refused by name.  A few fields of OpenAI's clients have no meaning here; they are accepted, and the
answer lists them as `ignored_fields`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from monoblock.errors import InputError
from monoblock.inference.settings import HISTORY_OPTIONS, SAMPLING_OPTIONS, Settings
from monoblock.serving.constraints import MAX_CHOICES

MAX_PROMPTS = 256  # of one request
MAX_INPUTS = 2048  # of one request for embeddings
MAX_ENTRIES = 1024  # of an object
MAX_TEXT = 1 << 20  # characters of a prompt or an input
MAX_STOPS = 16
MAX_SEQUENCES = 128
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls")
REFUSED = {
    "suffix": "text is continued, not inserted; leave out suffix",
    "best_of": "write n, and num_beams for a search",
    "functions": "write tools, which are passed to the chat template",
    "function_call": "calls are not parsed; leave it out, and read the text",
    "logit_processors": "write structured_outputs or logit_bias",
    "previous_response_id": "answers are not stored; send the whole conversation as input",
    "modalities": "only text is generated; leave it out",
    "audio": "only text is generated; leave it out",
    "background": "answers are not stored; leave it out",
}
# Names of OpenAI for fields of Settings.
SETTINGS_NAMES = {
    "n": "num_return_sequences",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}


def several(least: int, most: int) -> Any:
    """Return the limits of a list; its first wrong item is reported, and no further one is looked at."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def limit_entries(value: Any) -> Any:
    """Refuse an object with very many entries, each of which would be an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("entries", f"an object has at most {MAX_ENTRIES} entries; send fewer")
    return value


def _kind_of_input(value: Any) -> str:
    """Return which of the four types of an input is meant, so that a long one is looked at once."""
    first = value[0] if isinstance(value, list) and value else None
    return "a str" if isinstance(value, str) else f"list[{type(first).__name__}]"


def as_list(value: Any) -> list[Any]:
    """Return an input as a list of texts or of token ids."""
    return value if isinstance(value, list) and not isinstance(value[0], int) else [value]


Short = BeforeValidator(limit_entries)
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Ids = Annotated[list[int], several(1, MAX_TEXT)]
Input = Annotated[
    Annotated[Text, Tag("a str")]
    | Annotated[list[Text], several(1, MAX_INPUTS), Tag("list[str]")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[list[Ids], several(1, MAX_INPUTS), Tag("list[list]")],
    Discriminator(
        _kind_of_input,
        custom_error_type="input",
        custom_error_message="write a text, token ids, or a list of texts or of token ids, which is not empty",
    ),
]


class Strict(BaseModel):
    """An object whose fields are known, and all have the type that they are declared with."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    limit_entries = model_validator(mode="before")(limit_entries)


class Body(Strict):
    model: Annotated[str, Field(max_length=512)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: nothing is obfuscated


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """One constraint of the text: a JSON schema, a regular expression, a list of choices or a grammar (Lark)."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], several(0, MAX_CHOICES)] | None = None
    grammar: str | None = None


class EditBody(Strict):
    """An ablation of activations, as `mb.ablate` makes one."""

    names: Annotated[str, Field(max_length=200)]
    method: Literal["zero", "mean"] = "zero"
    heads: Annotated[list[int], Field(max_length=1024)] | None = None
    positions: Annotated[list[int], Field(max_length=1024)] | None = None


class InspectBody(Strict):
    """lens: how many tokens per layer; attention: pairs [layer, head]; edits: what to ablate."""

    lens: Annotated[int, Field(ge=1, le=10)] | None = None
    attention: Annotated[list[Annotated[list[int], Field(min_length=2, max_length=2)]], Field(max_length=16)] = []
    edits: Annotated[list[EditBody], Field(max_length=16)] = []


if TYPE_CHECKING:
    FilterBody = Body
else:  # the fields of the decoding filters, which `options` reads by their names
    FILTERS = {name: get_type_hints(Settings)[name] for name in (*SAMPLING_OPTIONS, *HISTORY_OPTIONS)}
    FilterBody = create_model(
        "FilterBody", __base__=Body, **{name: (one | None, None) for name, one in FILTERS.items()}
    )


class DecodingBody(FilterBody):
    """The fields of `Settings` that a request may set, under OpenAI's names where it has one."""

    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    temperature: Annotated[float, Field(ge=0)] | None = None
    logit_bias: Annotated[dict[str, float], Short] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], several(0, MAX_STOPS)] | None = None
    num_beams: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    length_penalty: float | None = None
    length_penalty_form: Literal["length", "gnmt"] | None = None
    early_stopping: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    draft: Literal["8-bit", "4-bit"] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    receipt: bool = False
    inspect: InspectBody | None = None

    user: str | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Short] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None

    @property
    def is_quick(self) -> bool:
        """Whether no grammar has to be compiled, and no weights read, before the text begins."""
        return self.response_format is None and self.structured_outputs is None and not self.receipt

    def ignored_fields(self) -> list[str]:
        return [name for name in IGNORED if name in self.model_fields_set and getattr(self, name) is not None]

    def options(self) -> dict[str, Any]:
        """Return what the request says of `Settings`, by the names there."""
        names = {*Settings.__dataclass_fields__, *SETTINGS_NAMES}
        if len({"max_tokens", "max_completion_tokens"} & self.model_fields_set) == 2:
            raise InputError("max_tokens and max_completion_tokens mean the same; write one of them")
        given = {name: getattr(self, name) for name in sorted(self.model_fields_set) if name in names}
        options = {SETTINGS_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        options.pop("logprobs", None)  # which differs by route
        if isinstance(self, CompletionBody) and self.max_tokens is not None:  # which has a default
            options["max_new_tokens"] = self.max_tokens
        if self.logit_bias is not None:
            options["logit_bias"] = _token_numbers(self.logit_bias)
        return options

    def constraint(self) -> tuple[str, Any] | None:
        """Return the kind and the value of the constraint of the text, if there is one."""
        found: list[tuple[str, Any]] = []
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            if self.response_format.type == "json_schema" and schema is None:
                raise InputError("response_format json_schema has no schema; write json_schema={'schema': {…}}")
            found.append(("json", schema.schema_) if schema is not None else ("json_object", None))
        if self.structured_outputs is not None:
            said = self.structured_outputs
            kinds = {"json": said.json_, "regex": said.regex, "choice": said.choice, "grammar": said.grammar}
            written = [(kind, value) for kind, value in kinds.items() if value is not None]
            if not written:
                raise InputError(f"structured_outputs has no constraint; write one of {', '.join(kinds)}")
            found += written
        if len(found) > 1:
            raise InputError(f"{' and '.join(kind for kind, _ in found)} constrain the same text; write one of them")
        return found[0] if found else None


def _token_numbers(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InputError('logit_bias has a key that is no token id; write {"50": -2.5}') from None


class CompletionBody(DecodingBody):
    prompt: Input
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a template may read what a model needs

    role: str
    content: Text | Annotated[list[dict[str, Any]], several(0, 10_000)] | None = None


class ChatBody(DecodingBody):
    messages: Annotated[list[Message], several(1, 10_000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], several(0, 128)] | None = None
    tool_choice: Literal["none", "auto"] | None = None


class ResponsesBody(DecodingBody):
    input: Text | Annotated[list[dict[str, Any]], several(1, 10_000)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None


class EmbeddingsBody(Body):
    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "cls", "last"] | None = None
    user: str | None = None


class TranslateBody(Body):
    input: Text | Annotated[list[Text], several(1, MAX_PROMPTS)]
    num_beams: Annotated[int, Field(ge=1, le=64)] | None = None
    n_best: Annotated[int, Field(ge=1, le=64)] = 1
    length_penalty: float | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    alignments: bool = False
    to: str | None = None


class ClassifyBody(Body):
    input: Text | Annotated[list[Text], several(1, MAX_PROMPTS)]
    top: Annotated[int, Field(ge=1, le=1000)] = 1


class FillBody(ClassifyBody):
    top: Annotated[int, Field(ge=1, le=1000)] = 5


class TokenizeBody(Body):
    text: Text
    add_special_tokens: bool = False


class DetokenizeBody(Body):
    tokens: Annotated[list[int], several(0, MAX_TEXT)]


BODIES = (CompletionBody, ChatBody, ResponsesBody, EmbeddingsBody, TranslateBody, FillBody, TokenizeBody)
FIELDS = sorted({name for body in BODIES for name in body.model_fields})
