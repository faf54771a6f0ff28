"""Run files: a `RunConfig` as YAML, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from embroute.config.cluster_file import load_yaml
from embroute.config.option_model import Options, as_keys, check_names
from embroute.config.run_options import RunConfig
from embroute.config.spec import Size, shown

RUN_FILE, CHECKPOINTS = "run.yaml", "checkpoints"  # in the folder of a run


def read_run_file(path: Path) -> RunConfig:
    """Read a run file; errors name the file and the key."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {shown(content)}")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    try:
        check_names(RunConfig, values, "key")
        return RunConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {as_keys(str(error))}") from None


def write_run_file(run: RunConfig, path: Path) -> None:
    """Write the options that differ from their defaults, as YAML."""
    path.write_text(yaml.safe_dump(_plain(run.changed()), sort_keys=False))


def keep_run_file(run: RunConfig, folder: Path) -> None:
    """Write the run file into the run's folder, unless an equal one is there already."""
    path = folder / RUN_FILE
    if path.is_file():
        try:
            known = read_run_file(path)
        except ValueError:
            known = None  # written by another version, for example
        if known is not None and known.replace(resume=run.resume, out=run.out) == run:
            return
    # The copy does not resume: a user must ask for that again.
    write_run_file(run.replace(resume=False), path)


def _plain(value: object) -> object:
    """A value of lists, dicts and texts only, which YAML can write."""
    if isinstance(value, Options):
        return _plain(value.changed())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return int(value)  # 64, not '64'
    if isinstance(value, Size):
        return f"{value.amount:.0f}B" if value.unit == "bytes" else str(value)
    return value
