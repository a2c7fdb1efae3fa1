"""The model that a step is estimated for: its attention, and the arithmetic of everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_dcp.planning.batch import ModelShape

GUESS = "guessed from the heads: 12 x layers x (heads x head dim)^2"


@dataclass(frozen=True)
class Model:
    """
    Args:
        shape: attention of all layers.
        parameters: weights that every token is multiplied with.
        source: where these are from, for reports.
    """

    shape: ModelShape
    parameters: int
    source: str

    @property
    def layers(self) -> int:
        return sum(layers for _, layers in self.shape.windows)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward of all but attention: 2 and 4 FLOPs per weight."""
        return 6 * self.parameters


def guessed(shape: ModelShape, parameters: float | None = None) -> Model:
    """A model of which only the attention is known, or also its number of weights."""
    layers = sum(layers for _, layers in shape.windows)
    if parameters is not None:
        if not 1 <= parameters < float("inf"):
            raise ValueError(f"--parameters must be a number of at least 1, such as 8e9, not {parameters}")
        return Model(shape, int(parameters), f"{parameters:.3g} parameters, as given")
    guess = 12 * layers * (shape.heads * shape.head_dim) ** 2
    return Model(shape, guess, f"{guess:.3g} parameters, {GUESS}")


def read_model(name: str, dtype: str | None = None) -> Model:
    """The model of a name on the hub or of a folder, from its configuration alone: no weights are loaded.

    Args:
        dtype: type of Q, K and V; None: that of the configuration.

    Raises:
        ValueError: if the configuration can't be read, or DCP can't run the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_dcp.integrations.models import check_model

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"--model {name} has no configuration that can be read ({first}): name a model on the hub or its folder, "
            "or give --heads, --kv-heads, --head-dim and --layers"
        ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="dcp")
    shape = check_model(model)
    if dtype is not None:
        shape = replace(shape, dtype=dtype)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and config.get_text_config().tie_word_embeddings
    total = sum(weight.numel() for weight in model.parameters())
    used = total if tied else total - embedding.numel()
    return Model(shape, used, f"{name}: {total / 1e9:.3g} billion parameters")
