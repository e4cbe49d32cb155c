"""Texts about where a model comes from and whether this release knows it: huggingface_hub, transformers, the registries."""
from __future__ import annotations

from tightrank.diagnose.signature import Rank, Signature

_DIRECTORY = "or fetch it once and give `model` the local directory"
_TOKEN = f"give the engine a token that may read it (HF_TOKEN), accept its licence on the hub, {_DIRECTORY}"
_UNKNOWN = "a newer release of the engine (with its own transformers, not that package alone), or another model"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "hub-access-denied",
        r"(?:You are trying to access a gated repo\.|\S{1,200} is a gated repository)",
        "The model is gated: the hub wants a token of somebody who has accepted its terms.",
        _TOKEN, "transformers 4.30 - 5.19 utils/hub.py", decisive=False),
    Signature(
        "model-not-found",
        r"(?P<revision>\S{1,200}) is not a valid git identifier \(branch name, tag name or commit id\)",
        "The model has no revision {revision}.",
        "--revision: a branch, tag or commit that the hub shows, or none",
        "transformers 4.30 - 5.19 utils/hub.py", decisive=False),
    Signature(
        "model-not-found",
        r"(?P<model>\S{1,200}) is not a local folder and is not a valid model identifier",
        "There is no directory and no model of the hub called {model}.",
        f"correct `model`, {_DIRECTORY}; a private model wants HF_TOKEN",
        "transformers 4.30 - 5.19 utils/hub.py", decisive=False),
    Signature(
        "model-not-found",
        r"Repo id must (?:be in the form|use alphanumeric|be a string).{0,300}",
        "The model's path does not exist on this host, so it was taken for a name on the hub.",
        "`model`: a directory that exists on this host (each node of the worker), with config.json",
        "huggingface_hub 0.2 - 1.33 utils/_validators.py", decisive=False),
    Signature(
        "model-not-found",
        r"Invalid repository ID or local directory specified: (?P<model>.{1,200})",
        "There is no model at {model}.",
        "model: a directory with config.json and the weights",
        "vLLM 0.20.2 - 0.33.0 transformers_utils/config.py", shape="any"),
    Signature(
        "hub-unreachable",
        r"(?:We couldn't connect to '(?P<hub>[^']{1,100})' to load|Cannot reach \S{1,200}: offline mode is enabled|An error "
        r"happened while trying to locate the file)",
        "The model hub could not be reached, and the model is not in the local cache.",
        f"mend the network or the proxy, {_DIRECTORY}; with HF_HUB_OFFLINE=1 the whole model must be in the cache",
        "transformers 4.30 - 5.19 utils/hub.py, huggingface_hub 1.33", decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "hub-access-denied",
        r"(?P<status>40[13]) Client Error\..{0,300}",
        "The model hub refused the model ({status}).",
        _TOKEN, "huggingface_hub 0.2 - 1.33 utils/_http.py", decisive=False, rank=Rank.DOUBTFUL, confidence="likely",
        error="GatedRepoError|RepositoryNotFoundError|HfHubHTTPError|HTTPError|HTTPStatusError"),
    Signature(
        "model-not-found",
        r"(?P<status>404) Client Error\..{0,300}",
        "The model hub knows no such model, revision or file ({status}).",
        f"correct `model` and --revision, {_DIRECTORY}",
        "huggingface_hub 0.2 - 1.33 utils/_http.py", decisive=False, rank=Rank.DOUBTFUL, confidence="likely",
        error="RevisionNotFoundError|RepositoryNotFoundError|(?:Remote)?EntryNotFoundError|HfHubHTTPError|HTTPError"),
    Signature(
        "hub-unreachable",
        r"(?:(?P<status>429|50[0234]) (?:Client|Server) Error|429 Too Many Requests|\(MaxRetryError\(|\(ReadTimeoutError\()",
        "The model hub did not answer, or has had too many requests from here.",
        f"HF_HUB_OFFLINE=1 where the model is in the cache, {_DIRECTORY}",
        "huggingface_hub 0.2 - 1.33, requests", decisive=False, rank=Rank.DOUBTFUL, confidence="likely"),
    Signature(
        "model-unsupported",
        r"Model architectures (?P<architectures>.{1,100}?) are not supported for now",
        "This release of the engine does not know the architecture {architectures}.",
        _UNKNOWN + "; a line `Ignore import error` above it means that a package is missing instead",
        "vLLM 0.5 - 0.33.0 model_executor/models/registry.py, SGLang 0.3 - 0.5.23 models/registry.py", decisive=False),
    Signature(
        "model-unsupported",
        r"Model architectures? (?P<architectures>.{1,100}?) (?:failed to be inspected|(?:is|are) not supported in-tree|was "
        r"supported in vLLM until|has been removed)",
        "This release of the engine cannot load the architecture {architectures}.",
        _UNKNOWN + "; the lines above it may name a missing package",
        "vLLM 0.8 - 0.33.0 model_executor/models/registry.py", decisive=False),
    Signature(
        "model-unsupported",
        r"The checkpoint you are trying to load has model type `(?P<type>[^`]{1,80})` but Transformers does not recognize",
        "The installed transformers does not know the model type {type}.",
        _UNKNOWN, "transformers 4.40 - 5.19 configuration_auto.py", decisive=False),
    Signature(
        "model-unsupported",
        r"(?P<architectures>\w{1,80}) has no SGlang implementation",
        "This release of SGLang does not know the architecture {architectures}.",
        _UNKNOWN, "SGLang 0.4 - 0.5.23 model_loader/utils.py", decisive=False),
    Signature(
        "model-unsupported",
        r"Cannot find model module\. '(?P<architectures>[^']{1,80})' is not a registered model in the Transformers library",
        "Neither this release of SGLang nor the installed transformers knows the architecture {architectures}.",
        _UNKNOWN, "SGLang 0.4.7 - 0.5.23 model_loader/utils.py", decisive=False),
    Signature(
        "arguments-invalid",
        r"(?:The repository (?:for )?)?.{1,200} (?:contains custom code which must be executed|requires you to execute the "
        r"configuration file)",
        "The model needs code of its own.",
        "--trust-remote-code, if you trust the model's author: it runs their code",
        "transformers 4.30 - 5.19 dynamic_module_utils", decisive=False),
    Signature(
        "model-unreadable",
        r"(?:Couldn't instantiate the backend tokenizer from one of:|Can't load tokenizer for '.{1,300}')",
        "The model's directory has no tokenizer that can be loaded.",
        "fetch the tokenizer's files (tokenizer.json, tokenizer_config.json) beside the weights, or name another directory "
        "with --tokenizer (vLLM) or --tokenizer-path (SGLang)",
        "transformers 4.45 - 5.19 tokenization_utils_tokenizers.py, tokenization_utils_base.py", decisive=False),
    Signature(
        "model-unreadable",
        r"(?:Can't load the configuration of |.{1,200} does not appear to have a file named )",
        "The model's directory lacks a file that the engine needs: see the line.",
        "fetch the model again, whole: config.json, the tokenizer's files and all weights",
        "transformers 4.30 - 5.19", decisive=False),
)
