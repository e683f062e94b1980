"""Every failure a caller may want to tell apart, as one tree.

AgentKVError
    EngineError
        EngineNotOpenError  EngineClosedError  EngineDeadError  StepError  WrongLoopError
    SessionError
        SessionClosedError  SessionBusyError  CheckpointError  NamespaceError
    CapacityError
        QueueFullError  OutOfBlocksError  ContextLengthError
    RequestError (also a ValueError)
        InvalidOptionError  ChatTemplateError
    ModelError
        UnsupportedModelError  UntrustedModelError

Timeouts are the built-in TimeoutError; cancellation is the event loop's own exception.
Messages carry numbers and names, never prompts or token ids.
"""

from __future__ import annotations

__all__ = [
    "AgentKVError",
    "CapacityError",
    "ChatTemplateError",
    "CheckpointError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "EngineNotOpenError",
    "InvalidOptionError",
    "ModelError",
    "NamespaceError",
    "OutOfBlocksError",
    "QueueFullError",
    "RequestError",
    "SessionBusyError",
    "SessionClosedError",
    "SessionError",
    "StepError",
    "UnsupportedModelError",
    "UntrustedModelError",
    "WrongLoopError",
]


class AgentKVError(Exception):
    """Base of every error this package raises on purpose."""


class EngineError(AgentKVError):
    """The engine as a whole cannot do what was asked."""


class EngineNotOpenError(EngineError):
    """The engine was used before `async with engine` opened it."""


class EngineClosedError(EngineError):
    """The engine has been closed, or is closing."""


class EngineDeadError(EngineError):
    """The step thread ended; `cause` says why. Open a new engine."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message, cause)
        self.cause: BaseException | None = cause
        self.__cause__: BaseException | None = cause

    def __str__(self) -> str:
        return str(self.args[0])


class StepError(EngineError):
    """A step failed with this call in it; `cause` says why. The session is unchanged."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message, cause)
        self.cause: BaseException | None = cause
        self.__cause__: BaseException | None = cause

    def __str__(self) -> str:
        return str(self.args[0])


class WrongLoopError(EngineError):
    """The engine was used from another event loop, or process, than the one that opened it."""


class SessionError(AgentKVError):
    """A session cannot do what was asked in its present state."""


class SessionClosedError(SessionError):
    """The session has been closed."""


class SessionBusyError(SessionError):
    """A running or waiting call, or an open stream, of the session stands in the way."""


class CheckpointError(SessionError):
    """The checkpoint is closed, or belongs to another session."""


class NamespaceError(SessionError):
    """The operation would carry KV from one namespace into another."""


class CapacityError(AgentKVError):
    """There is not enough room for the request."""


class QueueFullError(CapacityError):
    """Too many calls are waiting already."""


class OutOfBlocksError(CapacityError):
    """More KV blocks are needed than the pool can give."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return (
            f"{self.needed} KV blocks are needed and {self.available} are available; ask for "
            "less at once, or open the engine with a larger num_blocks or kv_memory_bytes"
        )


class ContextLengthError(CapacityError):
    """The request is longer than the context or the whole pool can hold, in tokens."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(tokens, limit)
        self.tokens = tokens
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the request takes {self.tokens} tokens and the limit is {self.limit}; "
            "shorten the prompt or max_tokens, or open the engine with a larger max_context or "
            "more KV memory (num_blocks, kv_memory_bytes), whichever is the limit"
        )


class RequestError(AgentKVError, ValueError):
    """The request itself is wrong."""


class InvalidOptionError(RequestError):
    """An option has a value outside its range."""


class ChatTemplateError(RequestError):
    """The messages cannot be rendered by the model's chat template."""


class ModelError(AgentKVError):
    """The model cannot be found or loaded."""


class UnsupportedModelError(ModelError):
    """The model would not be served correctly, and is refused; the message says why."""


class UntrustedModelError(ModelError):
    """The model folder wants to run its own code, which `allow_remote_code` does not allow."""
