"""Loading plugins, each alone: import it, validate it, call its hooks into scratch registries, then merge.

One that fails leaves nothing behind and stops no other; it is kept as a PluginFailure.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import pluggy

from rtp_runtime import hookspecs
from rtp_runtime.cli import COMMANDS
from rtp_runtime.env import read_environment
from rtp_runtime.errors import PluginError
from rtp_runtime.hookspecs import PROJECT
from rtp_runtime.lazy import Origin, attribute
from rtp_runtime.plugins.catalogue import LoadedPlugin, Plugins, merge
from rtp_runtime.plugins.discovery import Candidate, discover
from rtp_runtime.plugins.failures import BadPluginError, PluginFailure
from rtp_runtime.plugins.registries import ScratchRegistries
from rtp_runtime.plugins.validation import check_api, check_hooks, hook_arguments

_HEAVY = frozenset({"torch", "transformers"})


@dataclass(frozen=True, slots=True)
class _Loaded:
    candidate: Candidate
    hooks: tuple[str, ...]
    scratch: ScratchRegistries


def load_plugins(names: Iterable[str] = (), env: bool = True) -> Plugins:
    """Load the installed plugins, the modules in `names`, and those in RTP_PLUGINS if `env`.

    Raises PluginError when a plugin that was named fails, UsageError for a value of RTP_PLUGINS that names no module.
    """
    wanted = [*names, *(read_environment().plugins if env else ())]
    loaded: list[_Loaded] = []
    failed: list[tuple[Candidate, BadPluginError]] = []
    for candidate in discover(wanted):
        try:
            loaded.append(_load(candidate))
        except BadPluginError as error:
            failed.append((candidate, error))
    loaded, orphans = _split_orphans(loaded)
    failed += [(each.candidate, fault) for each, fault in orphans]
    for candidate, fault in failed:
        if candidate.named:
            raise PluginError(f"{candidate.origin}, which you named, is {fault.kind}: {fault}") from fault
    failures = [PluginFailure.of(candidate.origin, fault) for candidate, fault in failed]
    return merge([(_describe(each), each.scratch) for each in loaded], failures)


def _load(candidate: Candidate) -> _Loaded:
    if candidate.fault is not None:
        raise candidate.fault
    scratch = ScratchRegistries.of(candidate.origin, reserved=COMMANDS)
    # A plugin that prints would spoil the one JSON object of a command with --json.
    with contextlib.redirect_stdout(sys.stderr), _no_heavy_imports():
        plugin = _import(candidate)
        hooks = check_hooks(plugin)
        _call(plugin, hooks, scratch)
    return _Loaded(candidate, tuple(hooks), scratch)


def _import(candidate: Candidate) -> Any:
    try:
        check_api(candidate.module, candidate.origin.distribution)
        module = importlib.import_module(candidate.module)
    except (BadPluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BadPluginError("broken", f"importing {candidate.module}: {type(error).__name__}: {error}") from error
    name = candidate.value.partition(":")[2].strip()
    try:
        return attribute(module, name, candidate.origin) if name else module
    except PluginError as error:
        raise BadPluginError("broken", str(error)) from error


def _call(plugin: Any, hooks: list[str], scratch: ScratchRegistries) -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    for name in hooks:
        argument = hook_arguments()[name]
        try:
            getattr(manager.hook, name)(**{argument: getattr(scratch, argument)})
        except (BadPluginError, KeyboardInterrupt):
            raise
        except PluginError as error:
            raise BadPluginError("broken", f"{name}: {error}") from error
        except BaseException as error:
            raise BadPluginError("raising", f"{name} raised {type(error).__name__}: {error}") from error


class _Blocker(Loader):
    """Finds heavy packages for one thread and refuses to load them; keeps the refusals."""

    def __init__(self) -> None:
        self.refusals: list[ImportError] = []
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Looking whether a heavy package is there is allowed: only loading is not."""
        heavy = name.partition(".")[0] in _HEAVY and threading.get_ident() == self._thread
        return ModuleSpec(name, self) if heavy else None

    def exec_module(self, module: ModuleType) -> NoReturn:
        name = module.__name__
        self.refusals.append(ImportError(f"{name} must not be imported while plugins register", name=name))
        raise self.refusals[-1]


@contextlib.contextmanager
def _no_heavy_imports() -> Iterator[None]:
    """Refuse torch and transformers, so that the traceback shows which line of the plugin wants them.

    Where they are loaded already nothing is refused: the command line starts without them.
    """
    blocker = _Blocker()
    sys.meta_path.insert(0, blocker)
    try:
        yield
    except BadPluginError:
        if not blocker.refusals:
            raise
    finally:
        sys.meta_path.remove(blocker)
    if blocker.refusals:
        refusal = blocker.refusals[0]
        raise BadPluginError(
            "heavy",
            f"it imports {refusal.name} while it registers, which would slow every command. "
            "Import it in the modules that the registered strings name.",
        ) from refusal


def _split_orphans(loaded: list[_Loaded]) -> tuple[list[_Loaded], list[tuple[_Loaded, BadPluginError]]]:
    """Set apart plugins that add to an architecture nobody provides; without them another may become one."""
    orphans: list[tuple[_Loaded, BadPluginError]] = []
    while True:
        known = {model.architecture for each in loaded for model in each.scratch.models}
        lost = {each.candidate.origin: each.scratch.extended_architectures() - known for each in loaded}
        kept = [each for each in loaded if not lost[each.candidate.origin]]
        if len(kept) == len(loaded):
            return kept, orphans
        orphans += [
            (each, _unknown_model(lost[each.candidate.origin])) for each in loaded if lost[each.candidate.origin]
        ]
        loaded = kept


def _unknown_model(architectures: set[str]) -> BadPluginError:
    names = ", ".join(sorted(architectures))
    return BadPluginError("unknown model", f"it adds to {names}, which no plugin provides. Install the one that does.")


def _describe(each: _Loaded) -> LoadedPlugin:
    origin: Origin = each.candidate.origin
    return LoadedPlugin(
        name=origin.plugin,
        distribution=origin.distribution,
        version=origin.version,
        module=each.candidate.module,
        hooks=each.hooks,
        architectures=tuple(model.architecture for model in each.scratch.models),
    )
