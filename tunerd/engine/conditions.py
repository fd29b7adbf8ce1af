"""The conditions that a measurement would be valid for now: the fingerprint of what a unit would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.builds import engine_of, find_programs
from tunerd.engine.capabilities import Engine, Found
from tunerd.engine.fingerprint import Fingerprint, models_sha256
from tunerd.engine.flags import arguments_sha256, named_files
from tunerd.engine.serving import limits_in_force, specifiers_of
from tunerd.errors import HostError, ModelFileError
from tunerd.machine.files import stamp_of
from tunerd.machine.host import read_host
from tunerd.model.facts import ModelFacts
from tunerd.model.files import ModelFiles
from tunerd.units.generations import Generation
from tunerd.units.text import environment_of, parse_unit
from tunerd.words import digest, sha256

_MODELS = ("model.path", "speculation.draft_model", "model.mmproj")
_TEMPLATE = "model.chat_template_file"


@dataclass(frozen=True, slots=True)
class FingerprintNow:
    """A fingerprint, and why parts of it are unknown."""

    fingerprint: Fingerprint
    problems: tuple[str, ...] = ()


class FingerprintReader:
    """Reads fingerprints of what the unit runs, or would; the machine, each engine and each model only once.

    Engines are probed by what is remembered of them; one that changed is run again as probes are.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._host = read_host(ctx.gpu)
        self._programs = find_programs(ctx)
        self._files = ModelFiles(ctx.paths.cache_dir, ctx.files)
        self._limits = limits_in_force(ctx)
        self._engines: dict[str, Engine] = {}
        self._models: dict[str, tuple[ModelFacts | None, str | None]] = {}

    def of(
        self,
        argv: Sequence[str] | None,
        environment: Mapping[str, str] | None = None,
        *,
        workload_sha256: str | None = None,
    ) -> FingerprintNow:
        """The fingerprint of a command line, with what its unit puts into the environment.

        Args:
            argv: The whole argument vector, program first; None where it is not known.
            environment: The unit's variables.
            workload_sha256: Of the workload that is measured, if it is one.
        """
        gpus, problems = self._host.gpus, []
        engine = model = template = arguments = None
        if gpus is None:
            problems.append(f"the GPUs cannot be read: {self._host.gpu_problem}")
        if argv:
            named = named_files(argv)
            found = self.engine(argv[0])
            if found.identity is not None:
                engine = found.identity.sha256
            else:
                problems.append(f"the engine is unknown: {found.problem}")
            model, template = self._model(named, problems)
            arguments = arguments_sha256(argv, environment)
        fingerprint = Fingerprint(
            engine_sha256=engine,
            driver_version=self._host.driver_version,
            gpu_names=None if gpus is None else tuple(gpu.name for gpu in gpus),
            gpu_memory_mib=None if gpus is None else tuple(gpu.total_mib for gpu in gpus),
            power_limits_w=None if gpus is None else tuple(gpu.power_limit_w for gpu in gpus),
            cpu_model=self._host.cpu.model,
            model_sha256=model,
            template_sha256=template,
            arguments_sha256=arguments,
            workload_sha256=workload_sha256,
            unit_limits=self._limits,
            tunerd_version=__version__,
        )
        return FingerprintNow(fingerprint, tuple(problems))

    def of_generation(self, generation: Generation) -> FingerprintNow:
        """The fingerprint of what was deployed, with the variables of its own unit."""
        text = self._ctx.generations.unit_text(generation.number)
        if text is None:
            return self.of(generation.argv)
        unit = parse_unit(text.decode("utf-8", "surrogateescape"))
        specifiers = specifiers_of(self._ctx, generation.unit)
        return self.of(generation.argv, environment_of(unit, specifiers))

    def engine(self, program: str) -> Engine:
        """The build behind a program, as it was found or is named."""
        if program not in self._engines:
            found = next((f for f in self._programs if str(f.program) == program), None)
            self._engines[program] = engine_of(
                self._ctx, found or Found(Path(program), "command line")
            )
        return self._engines[program]

    def main_model(self, argv: Sequence[str] | None, then: Fingerprint) -> ModelFacts | None:
        """The main model of a command line; None where any of its files is another by now."""
        named = named_files(argv or ())
        model, _ = self._model(named, [])
        if model is None or model != then.model_sha256 or "model.path" not in named:
            return None
        return self._facts(named["model.path"])[0]

    def _model(
        self, named: Mapping[str, str], problems: list[str]
    ) -> tuple[str | None, str | None]:
        """Identity of all models, with other files that change answers, and hash of the template.

        `problems` takes what stands against telling them.
        """
        found = [self._facts(named[key]) for key in _MODELS if key in named]
        identities = [None if facts is None else facts.identity.sha256 for facts, _ in found]
        for path in sorted({named[key] for key in named.keys() - {*_MODELS, _TEMPLATE}}):
            stamp = stamp_of(Path(path))
            identities.append(None if stamp is None else digest(stamp))
            problems += [f"no such file: `{path}`"] if stamp is None else []
        main = found[0][0] if found else None
        template = main.chat_template_sha256 if main is not None else None
        problems += [problem for _, problem in found if problem is not None]
        if _TEMPLATE in named:
            template = self._template(named[_TEMPLATE], problems)
        return models_sha256(identities), template

    def _facts(self, path: str) -> tuple[ModelFacts | None, str | None]:
        if path not in self._models:
            try:
                self._models[path] = (self._files.read_facts(Path(path)), None)
            except ModelFileError as error:
                self._models[path] = (None, error.message)
        return self._models[path]

    def _template(self, path: str, problems: list[str]) -> str | None:
        content, problem = None, f"no such template file: `{path}`"
        try:
            content = self._ctx.files.read(Path(path))
        except HostError as error:
            problem = error.message
        problems += [problem] if content is None else []
        return sha256(content)
