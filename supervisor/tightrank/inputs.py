"""What the plan needs from outside the configuration, read once: the environment, the model's config.json, API keys."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightrank.config import Config
from tightrank.config.flags import FLAGS, value


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
        if worker.api_key_file is not None:
            keys[worker.name] = read_secret(config, f"workers[{index}].api_key_file", worker.api_key_file)
        elif (written := value(worker.args, *FLAGS[config.engine]["api_key"])) is not None:
            keys[worker.name] = _sendable(config, f"workers[{index}].args", "--api-key", written)
        elif config.engine == "vllm" and (variable := {**environment, **worker.env}.get("VLLM_API_KEY")):
            keys[worker.name] = _sendable(config, f"workers[{index}].env", "VLLM_API_KEY", variable)
    return keys


def read_secret(config: Config, key: str, path: str) -> str:
    """The one line in the file that `key` names. Raises ConfigError."""
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise config.error(key, f"{path} cannot be read ({reason}); make it readable or leave the key out") from None
    if not secret or len(secret.splitlines()) > 1:
        raise config.error(key, f"{path} must hold exactly one line, the secret")
    return _sendable(config, key, path, secret)


def _sendable(config: Config, key: str, place: str, secret: str) -> str:
    """`secret`, when an HTTP header can carry it. Raises ConfigError, which does not show it."""
    if not (secret.isascii() and secret.isprintable()):
        raise config.error(key, f"{place} has a secret with characters that no HTTP header carries; use printable ASCII")
    return secret
