"""The public names for type checkers; at run time each is imported when first used (see __init__.py)."""

from monoblock.baselines.lstm import Recurrent as Recurrent
from monoblock.config.families import (
    bart as bart,
    bert as bert,
    gpt as gpt,
    llama as llama,
    t5 as t5,
    vaswani as vaswani,
    vit as vit,
)
from monoblock.config.knobs import vary as vary
from monoblock.config.model import (
    AttentionConfig as AttentionConfig,
    BlockConfig as BlockConfig,
    EmbeddingConfig as EmbeddingConfig,
    ExpertsConfig as ExpertsConfig,
    FeedForwardConfig as FeedForwardConfig,
    FramesConfig as FramesConfig,
    HeadConfig as HeadConfig,
    InitConfig as InitConfig,
    ModelConfig as ModelConfig,
    NormConfig as NormConfig,
    PatchConfig as PatchConfig,
    QuantizeConfig as QuantizeConfig,
    RecurrentConfig as RecurrentConfig,
    Repeat as Repeat,
    StackConfig as StackConfig,
)
from monoblock.config.parts import (
    Alibi as Alibi,
    Buckets as Buckets,
    Learned as Learned,
    Rotary as Rotary,
    Scaling as Scaling,
    Sinusoid as Sinusoid,
)
from monoblock.config.presets import PRESETS as PRESETS, preset as preset, tiny as tiny
from monoblock.doctor.report import Finding as Finding, Report as Report
from monoblock.errors import (
    ConfigError as ConfigError,
    FileError as FileError,
    InputError as InputError,
    MonoblockError as MonoblockError,
)
from monoblock.inference.engine import Engine as Engine
from monoblock.inference.optimized import OptimizedModel as OptimizedModel, optimize as optimize
from monoblock.inference.settings import Settings as Settings
from monoblock.inspection.edits import ablate as ablate, add_vector as add_vector, patch as patch
from monoblock.inspection.trace import trace as trace
from monoblock.interop.adapters import load_adapter as load_adapter, save_adapter as save_adapter
from monoblock.interop.huggingface.export import export_hf as export_hf
from monoblock.model import Transformer as Transformer
from monoblock.nn.block import Block as Block
from monoblock.nn.cache import Cache as Cache
from monoblock.nn.interpolate_positions import interpolate as interpolate
from monoblock.nn.lora import (
    add_lora as add_lora,
    fold_lora as fold_lora,
    merge_lora as merge_lora,
    unmerge_lora as unmerge_lora,
)
from monoblock.nn.masks import (
    TokenPositions as TokenPositions,
    causal as causal,
    same_document as same_document,
    window as window,
)
from monoblock.nn.packed_documents import PackedDocuments as PackedDocuments
from monoblock.parallel.inference import join_processes as join_processes
from monoblock.quantization.convert import quantize as quantize
from monoblock.runs.account import account as account
from monoblock.runs.diagnose import diagnose as diagnose
from monoblock.runs.draw import draw as draw
from monoblock.runs.evaluate import evaluate as evaluate
from monoblock.runs.load import load as load
from monoblock.runs.pipeline import Pipeline as Pipeline
from monoblock.runs.run import Run as Run
from monoblock.runs.train import train as train
from monoblock.tasks.classification import Prediction as Prediction
from monoblock.tasks.evaluation_report import Evaluation as Evaluation
from monoblock.tasks.task import Task as Task
from monoblock.tasks.task_data import TaskData as TaskData, TaskInputs as TaskInputs
from monoblock.tokenizers.tokenizer import Tokenizer as Tokenizer
from monoblock.training.events import read_metrics as read_metrics

__version__: str
__all__: list[str]
