"""agentkv: many agents, one system prompt, one engine inside your event loop."""

from .checkpoint import Checkpoint
from .config import EngineConfig, GenerateOptions, SamplingOptions
from .core.batch import ModelInfo
from .core.protocols import Runner
from .engine import Engine
from .errors import (
    AgentKVError,
    CapacityError,
    ChatTemplateError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineNotOpenError,
    InvalidOptionError,
    ModelError,
    NamespaceError,
    OutOfBlocksError,
    QueueFullError,
    RequestError,
    SessionBusyError,
    SessionClosedError,
    SessionError,
    StepError,
    UnsupportedModelError,
    UntrustedModelError,
    WrongLoopError,
)
from .messages import (
    Completion,
    Delta,
    EngineStats,
    FinishReason,
    Message,
    TokenLogprob,
    Usage,
)
from .prompt import Prompt
from .session import Session, Status
from .stream import Stream
from .text.tokenizer import ChatTokenizer

__version__ = "0.1.0"

__all__ = [
    "AgentKVError",
    "CapacityError",
    "ChatTemplateError",
    "ChatTokenizer",
    "Checkpoint",
    "CheckpointError",
    "Completion",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineNotOpenError",
    "EngineStats",
    "FinishReason",
    "GenerateOptions",
    "InvalidOptionError",
    "Message",
    "ModelError",
    "ModelInfo",
    "NamespaceError",
    "OutOfBlocksError",
    "Prompt",
    "QueueFullError",
    "RequestError",
    "Runner",
    "SamplingOptions",
    "Session",
    "SessionBusyError",
    "SessionClosedError",
    "SessionError",
    "Status",
    "StepError",
    "Stream",
    "TokenLogprob",
    "UnsupportedModelError",
    "UntrustedModelError",
    "Usage",
    "WrongLoopError",
    "__version__",
]
