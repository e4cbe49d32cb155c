"""What the plan needs from outside the configuration, read once: the environment, the model's config.json, API keys."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tightrank.config import Config, read_secret
from tightrank.config.flags import FLAGS, value
from tightrank.config.secrets import sendable


@dataclass(frozen=True, slots=True)
class Inputs:
    """`model`: the parsed config.json. `api_keys`: worker name -> key; secret, so never shown."""
    environment: Mapping[str, str]
    model: Mapping[str, Any]
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)


def read(config: Config, environment: Mapping[str, str]) -> Inputs:
    """Raises ConfigError: no model directory, unreadable config.json, unreadable key file."""
    return Inputs(dict(environment), _model(config), _api_keys(config, environment))


def _model(config: Config) -> Mapping[str, Any]:
    path = Path(config.model) / "config.json"
    cause = "model-directory-missing"
    if not os.path.isdir(config.model):          # Path.is_dir raises for a name too long or a folder closed to us
        raise config.error("model", f"{config.model} is no directory; give the model's directory (to fetch one: "
                           "hf download OWNER/NAME --local-dir DIRECTORY)", cause)
    try:
        model = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise config.error("model", f"{config.model} has no config.json; give one that has", cause) from None
    except OSError as error:
        raise config.error("model", f"{path} cannot be read ({error.strerror}); make it readable", cause) from None
    except (ValueError, RecursionError) as error:
        raise config.error("model", f"{path} is not JSON ({error}); fetch the model again", cause) from None
    if not isinstance(model, dict):
        raise config.error("model", f"{path} holds no object; fetch the model again", cause)
    return model


def _api_keys(config: Config, environment: Mapping[str, str]) -> Mapping[str, str]:
    keys = {}
    for index, worker in enumerate(config.workers):
        path = f"workers[{index}]"
        if worker.api_key_file is not None:
            keys[worker.name] = read_secret(worker.api_key_file, partial(config.error, f"{path}.api_key_file"))
        elif (written := value(worker.args, *FLAGS[config.engine]["api_key"])) is not None:
            keys[worker.name] = sendable("--api-key", written, partial(config.error, f"{path}.args"))
        elif config.engine == "vllm" and (variable := {**environment, **worker.env}.get("VLLM_API_KEY")):
            keys[worker.name] = sendable("VLLM_API_KEY", variable, partial(config.error, f"{path}.env"))
    return keys
