"""A packed run again, here."""

from __future__ import annotations

import dataclasses
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import ConfigError
from forge_train.base.files import write_whole
from forge_train.base.names import PluginRef, canonical, is_file, split
from forge_train.base.strict_json import odd
from forge_train.loop.describe import plugin_list, to_toml
from forge_train.registry.discovery import NO_DISTRIBUTION, discover, is_name, plugin_name
from forge_train.run.run import is_checkpoint
from forge_train_kit.fingerprint import fingerprint

from ..configuration.request import Request, lay
from ..launching.devices import cuda_devices
from ..launching.world import here
from ..run_folder import RunFolder, flat
from .archive import Pack, opened
from .compared import Compared, compare
from .data import absent, changes
from .secrets import MASK

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup

_SAME = ("forge", "python", "torch", "cuda", "devices", "cpus", "threads", "platform")
"""Keys of environment.json that may change numbers or speed."""
_ENVIRONMENT = {"packages?": {"*": str}, "variables?": {"*": str}}
_LAUNCHED = ("threads", "OMP_NUM_THREADS")
"""A process's share of the cores, if Forge started several."""
MOST = 8
"""Packages that are told one by one."""
Row = tuple[str, str, str]
"""A difference: name, value in the pack and value here."""


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A packed run that is to be repeated."""

    pack: Pack
    request: Request
    nproc: int
    resume: str

    @property
    def packed(self) -> RunFolder:
        return RunFolder(self.pack.run)

    def differences(self, setup: Setup | None) -> list[Row]:
        """Differences from the packed record, before anything is trained.

        Args:
            setup: of the run here; None if its configuration is refused, and only the rest can be told.
        """
        known, mine = self.packed.environment, setup.environment() if setup else {}
        rows: list[Row] = []
        if setup:
            shared = self.nproc > 1 and known.get("launcher") == "forge"
            rows += _plugins(self.packed.plugins, plugin_list(setup.hooks))
            rows += _machine(known, mine, aside=_LAUNCHED if shared else ())
        values = _values(self.request)
        rows += [(f"data: {key}", then, now) for key, then, now in changes(self.pack.index["data"], values, Path())]
        if setup:
            rows += _settings(self.packed.config, dict(flat(tomllib.loads(to_toml(setup.config, setup.hooks)))))
        if (count := self.nproc if self.nproc > 1 else here().size) != self.pack.index["world"]:
            rows.append(("processes", str(self.pack.index["world"]), str(count)))
        return rows

    def compare(self, run: Path) -> Compared:
        """Compare the run that was made here with the pack."""
        return compare(self.packed, RunFolder(run))


@contextmanager
def repeating(request: Request, nproc: int | None, resume: str) -> Iterator[Repeat]:
    """Open the pack that a request names as its configuration.

    Args:
        request: of the user, whose own values count more than the pack's.
        nproc: processes that the user asked for; None for as many as the run had.
        resume: as `forge train` takes it.

    Raises:
        ConfigError: for a pack that can't be read, and for whatever of it is not here.
    """
    path = Path(request.config)
    if request.model_from:
        raise ConfigError(f"{path} is a pack, which repeats a run as it was: --from begins another one.")
    with opened(path) as pack, tempfile.TemporaryDirectory(prefix="forge-repeat-") as folder:
        config = _configuration(pack, request)
        file = Path(folder) / f"{path.resolve().stem}.toml"
        _write(file, config)
        write_whole(Path(folder) / "plugins.json", (pack.run / "plugins.json").read_text(encoding="utf-8"))
        full = dataclasses.replace(request, config=str(file), foreign=folder)
        _check_values(pack, full)
        yield Repeat(pack, full, nproc or _world(pack), _start(pack, resume))


def _write(file: Path, config: Mapping[str, Any]) -> None:
    import tomlkit

    write_whole(file, tomlkit.dumps(config))


def _configuration(pack: Pack, request: Request) -> dict[str, Any]:
    """The packed configuration, with plugins that are here.

    Raises:
        ConfigError: naming all that are not.
    """
    try:
        config = tomllib.loads((pack.run / "config.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{pack.name}: run/config.toml can't be read: {error}.") from error
    if problem := odd(RunFolder(pack.run).environment, _ENVIRONMENT):
        raise ConfigError(f"{pack.name}: in run/environment.json, {problem}.")
    asked = {plugin_name(spec) for spec in request.plugins}
    without = {canonical(name) for name in request.without}
    known, missing, unread = {one.name for one in discover()}, [], []
    for one in RunFolder(pack.run).plugins:
        name = one["name"]
        if name in without or name in asked:
            continue
        if name in known and is_name(_spec(config, name)):
            continue
        if one["distribution"] not in ("", NO_DISTRIBUTION):
            missing.append(one)
        elif not _is_here(one):
            unread.append(one)
    if missing:
        raise ConfigError(_install(pack, missing))
    if unread:
        raise ConfigError("\n".join(_code(pack, one) for one in unread))
    if "plugins" in config:
        config["plugins"] = [one for one in _listed(config) if is_name(one) or plugin_name(one) not in asked]
    return config


def _spec(config: Mapping[str, Any], name: str) -> str:
    """The way in which a configuration names a plugin."""
    return next((spec for spec in _listed(config) if plugin_name(spec) == name), name)


def _listed(config: Mapping[str, Any]) -> list[str]:
    found = config.get("plugins", [])
    return [str(spec) for spec in found] if isinstance(found, list) else []


def _is_here(one: Mapping[str, str]) -> bool:
    """Return True if a plugin that is in no package is at its old place, unchanged."""
    ref = PluginRef(one["name"], "", "", one.get("object", ""))
    absolute = is_file(ref.object) and Path(split(ref.object)[0]).is_absolute()
    return (absolute or (bool(ref.object) and not is_file(ref.object))) and (
        ref.file is not None and ref.file.is_file() and fingerprint(ref) == one["hash"]
    )


def _install(pack: Pack, missing: list[dict[str, str]]) -> str:
    names = ", ".join(f"{one['name']!r} ({one['distribution']} {one['version']})" for one in missing)
    specs = " ".join(dict.fromkeys(f"{one['distribution']}=={one['version']}" for one in missing))
    return f"{pack.name}: not installed here: {names}. Install what the run had: forge plugins install {specs}"


def _code(pack: Pack, one: Mapping[str, str]) -> str:
    name, place = one["name"], pack.index["sources"].get(one["name"])
    where = split(one.get("object", ""))[0]
    if place is None:
        return (
            f"{pack.name}: plugin {name!r} came from {where}, which is not here as it was, and was not packed. Name a "
            "copy of it with -p FILE."
        )
    attribute = one["object"].rpartition(":")[2] if ":" in one["object"] else ""
    root = Path(pack.name).with_suffix("") if pack.zipped else Path(pack.name)
    unpack = f"python -m zipfile -e {pack.name} {root}, " if pack.zipped else ""
    return (
        f"{pack.name}: plugin {name!r} is code that came with the pack ({place}), and none of it is run unread. "
        f"To trust it: {unpack}read it, and add -p {root / place}{f':{attribute}' if attribute else ''}"
    )


def _values(request: Request) -> dict[str, Any]:
    """Dotted key → value of a request, as far as it is written somewhere."""
    tree = lay(request)
    return {".".join(key): value.value for key, value in tree.values.items()}


def _check_values(pack: Pack, request: Request) -> None:
    """Check that nothing is asked for which the pack does not hold: secrets, and data that is not here."""
    values = _values(request)
    for key in pack.index["masked"]:
        if MASK in str(values.get(key, "")):
            section = key.partition(".")[0]
            raise ConfigError(
                f"{pack.name}: {key} is a secret, which is not packed: give it with -s {key}=…, or leave its section "
                f"out with --without {section}."
            )
    gone = list(absent(pack.index["data"], values, Path()))
    if gone:
        told = "; ".join(f"{key} = {value!r} ({what})" for key, value, what in gone)
        raise ConfigError(
            f"{pack.name}: data of the run is not here: {told}. Put it there, or name it: "
            f"-s {gone[0][0].partition('[')[0]}=PATH"
        )


def _world(pack: Pack) -> int:
    """The number of processes to start.

    Raises:
        ConfigError: if the run had more devices than there are here.
    """
    world = int(pack.index["world"])
    if here().launcher != "none":
        return 1
    known = RunFolder(pack.run)
    on_cuda = known.environment.get("devices") and known.config.get("run.device") != "cpu"
    if world > 1 and on_cuda and 0 < (count := cuda_devices()) < world:
        raise ConfigError(
            f"{pack.name}: the run had {world} processes, each with a device, and this machine has {count}. Ask for "
            f"another layout: --nproc {count}, with -s parallel.… where the pack sets it. Numbers are then equal "
            "within rounding."
        )
    return world


def _start(pack: Pack, resume: str) -> str:
    begins = pack.index["begins_at"]
    if not begins or resume != "auto":
        return resume
    if is_checkpoint(Path(begins)):
        return str(begins)
    raise ConfigError(
        f"{pack.name}: the run continued {begins}, which is not here, and a pack does not hold it: name a copy of that "
        "checkpoint with --resume PATH."
    )


def _plugins(then: list[dict[str, str]], now: list[dict[str, str]]) -> Iterator[Row]:
    before, after = ({one["name"]: one for one in side} for side in (then, now))
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"plugin {name}", "enabled" if old else "–", "enabled" if new else "–"
        elif _release(old) != _release(new):
            yield f"plugin {name}", _release(old), _release(new)
        elif old["hash"] != new["hash"]:
            yield f"plugin {name}", f"source {old['hash'][:8]}", f"source {new['hash'][:8]}"


def _release(one: Mapping[str, str]) -> str:
    return f"{one['distribution']} {one['version']}".strip()


def _machine(then: Mapping[str, Any], now: Mapping[str, Any], aside: tuple[str, ...]) -> Iterator[Row]:
    for key in _SAME:
        if key in then and then[key] != now[key] and key not in aside:
            yield key, _shown(then[key]), _shown(now[key])
    before, after = then.get("packages") or {}, now["packages"]
    others = [name for name in sorted(before) if before[name] != after.get(name) and name != "torch"]
    for name in others[:MOST]:
        yield f"package {name}", before[name], after.get(name, "not installed")
    if len(others) > MOST:
        yield "packages", f"{len(others) - MOST:,} more differ", ""
    old, new = then.get("variables") or {}, now["variables"]
    for name in sorted({*old, *new}) if "variables" in then else ():
        if old.get(name) != new.get(name) and MASK not in old.get(name, "") and name not in aside:
            yield f"${name}", old.get(name, "–"), new.get(name, "–")


def _settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Row]:
    for key in sorted({*then, *now}):
        before, after = then.get(key), now.get(key)
        if before != after and key != "plugins" and MASK not in str(before):
            yield key, _shown(before), _shown(after)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "–" if value in (None, "") else str(value)
