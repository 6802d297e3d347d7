"""Asking the hub about a model once, with a short time limit, before anything loads from it.

The libraries ask for every file again and again, half a minute in all, before they say that there is no
network or no such model.
"""

from __future__ import annotations

import importlib
import logging

from jfbatch.errors import ModelError

PATIENCE = 5.0  # seconds for one answer

logger = logging.getLogger(__name__)


def hub_answers(name: str) -> bool:
    """Whether the hub has the model and answers; False where only the copy in its cache is at hand.

    Raises ModelError where there is no such model, or neither an answer nor a copy.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    except errors.HFValidationError:
        raise ModelError(
            f"{name}: no such directory, and no name that the hub allows; use demo, a directory, a hub name "
            "or a .gguf file"
        ) from None
    if constants.HF_HUB_OFFLINE:
        if cached:
            return False
        raise ModelError(f"{name}: not in the hub's cache, and HF_HUB_OFFLINE keeps it from being fetched")
    try:
        huggingface_hub.HfApi().model_info(name, timeout=PATIENCE)
    except errors.GatedRepoError:
        reason = f"is gated: ask for access at {constants.ENDPOINT}/{name} and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"there is no such model at {constants.ENDPOINT} (for a private one set HF_TOKEN)"
    except _transport_errors() as error:
        reason = f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split())[:200]})"
        if cached:
            logger.warning("%s: %s; the copy in its cache is used", name, reason)
            return False
        reason += "; name a directory with the model, or run where there is a network"
    else:
        return True
    raise ModelError(f"{name}: {reason}")


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the library that the hub's client uses (httpx, requests) raises where no answer comes."""
    from huggingface_hub import errors, get_session

    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    return (library.HTTPError, errors.HfHubHTTPError, OSError)
