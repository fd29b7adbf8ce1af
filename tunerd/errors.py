"""Every exception that tunerd raises, as a tree.

TunerdError
    UsageError           the call itself is wrong
    ConfigError          a setting or profile is wrong; nothing was touched
        UnknownName          no profile or workload has this name
    HostError            the machine lacks something: driver, program, model file, permission
    ModelFileError       a GGUF file is missing, damaged or hostile
    EngineError          an engine cannot be probed, or lacks what a plan needs
    ServiceError         the service manager refused or did not answer
        JobCanceled          somebody else took the unit over while we waited
        NoSupervisor         tunerd's own service manager does not run
    DeployError          the swap failed; the machine is as before
        RolledBack       the swap failed after it began; the previous unit serves again
        Stranded         the swap failed and so did the way back
    BenchError           a measurement could not be taken or trusted
        LeaseEnded           somebody else, or its time limit, ended the measurement
    Interrupted          a person or a signal ended the command
    Busy                 another tunerd holds the lock

Every class has a stable `code` for scripts, an `exit_code`, and may carry what a person needs
beside the first line: `cause` (why, in the foreign program's own words), `state` (how the
machine is now) and `hint` (what to do next).
"""

from __future__ import annotations

from typing import ClassVar, Self


class TunerdError(Exception):
    """Anything that has no code of its own below."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        cause: str | None = None,
        state: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.state = state
        self.hint = hint

    @property
    def words(self) -> str:
        """The message with its cause, in one line."""
        return f"{self.message}: {self.cause}" if self.cause else self.message


class UsageError(TunerdError):
    """The command line is wrong, or contradicts itself."""

    code = "usage"
    exit_code = 2


class ConfigError(TunerdError):
    """A setting or a profile is wrong; nothing was touched."""

    code = "config"


class UnknownName(ConfigError):
    """No profile or workload has this name."""

    code = "unknown_name"


class HostError(TunerdError):
    """The machine lacks something that the command needs: a driver, a program, a file, a permission."""

    code = "host"


class ModelFileError(TunerdError):
    """A model file is missing, damaged, or not what it claims to be."""

    code = "model"


class EngineError(TunerdError):
    """An engine cannot be probed, or lacks what the plan needs."""

    code = "engine"


class ServiceError(TunerdError):
    """The service manager refused, or did not answer in time."""

    code = "service"


class JobCanceled(ServiceError):
    """Somebody else started or stopped the unit while tunerd waited for it."""

    code = "job_canceled"


class NoSupervisor(ServiceError):
    """On a machine without systemd, tunerd's supervisor is not running."""

    code = "no_supervisor"


class DeployError(TunerdError):
    """The swap failed before anything was changed."""

    code = "deploy"


class RolledBack(DeployError):
    """The swap failed after it began; the previous unit serves again."""

    code = "rolled_back"
    exit_code = 3


class Stranded(DeployError):
    """The swap failed, and so did the way back; a person must step in."""

    code = "stranded"
    exit_code = 4


class BenchError(TunerdError):
    """A measurement could not be taken, or cannot be trusted."""

    code = "bench"


class LeaseEnded(BenchError):
    """The measurement had to end: production was started, its time ran out, or it was killed."""

    code = "preempted"


class Interrupted(TunerdError):
    """Somebody ended the command: by Ctrl-C, by a signal, or by the answer no."""

    code = "interrupted"
    exit_code = 130

    @classmethod
    def by(cls, end: BaseException) -> Self:
        """Of a signal, or of Ctrl-C; its notes say how the machine is, where whoever was cut short knew it."""
        state = "\n".join(getattr(end, "__notes__", ())) or None
        hint = None if state else "`tunerd status` shows what serves"
        return cls("interrupted", state=state, hint=hint)


class Busy(TunerdError):
    """Another tunerd holds the lock."""

    code = "busy"
    exit_code = 75
