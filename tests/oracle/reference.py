"""The reference: transformers' glm5_next on the CPU, with ties in its selections broken deterministically.

`torch.topk` breaks exact ties arbitrarily, and the indexer's ReLU makes exact ties common, so the
unpatched reference disagrees with itself between a whole run and a run in pieces. `stable_topk` replaces
it (indexer and router alike) by a stable descending sort: the lowest index wins.

The reference spells float32 wherever it must not round to bfloat16. `double_precision` gives those words the
meaning float64, which turns it into a reference without rounding: its whole and pieced runs agree to 1e-13.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration
from transformers.utils import logging

Array = np.ndarray


@contextlib.contextmanager
def stable_topk() -> Iterator[None]:
    """Within the context, torch.topk and Tensor.topk choose the lowest index among equal scores."""
    originals = torch.topk, torch.Tensor.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if not largest:
            raise NotImplementedError("the model only selects the largest scores")
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    torch.topk = torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = originals


@contextlib.contextmanager
def double_precision(enabled: bool = True) -> Iterator[None]:
    """Within the context `torch.float32` and `Tensor.float` mean float64, new tensors' default too."""
    single, to_single = torch.float32, torch.Tensor.float
    if enabled:
        torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, to_single
        torch.set_default_dtype(single)


@dataclass
class Run:
    """What one run of the reference shows.

    `logits` [batch, time, vocab]; `hidden` [batch, time, D], after the final norm; `streams` per layer
    [batch, time, streams, D], after the layer; `states` {KDA layer: [batch, heads, K, V]} after the last
    token.
    """

    logits: Array
    hidden: Array
    streams: list[Array]
    states: dict[int, Array]


class Reference:
    """One checkpoint folder in the reference implementation, float32 or float64."""

    def __init__(self, folder: Path, dtype: str = "float32"):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.double = dtype == "float64"
        self.model, information = Glm5NextForConditionalGeneration.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        self.model.eval()
        if self.double:
            self.model.double()
        self.text = self.model.config.text_config
        mtp = f"model.language_model.layers.{self.text.num_hidden_layers}."
        surprises = [name for name in information["unexpected_keys"] if not name.startswith(mtp)]
        surprises += [str(name) for key in ("missing_keys", "mismatched_keys") for name in information[key]]
        if surprises:
            raise ValueError(f"{folder}: transformers does not read these tensors as written: {surprises}")
        self._share_selections()

    def _share_selections(self) -> None:
        """Lets a shared indexer layer use the last full one's selection wherever that layer stands.

        By itself the reference hands a selection only to the very next layer.
        """
        last: list[torch.Tensor | None] = [None]

        def hand_on(_module: Any, _inputs: Any, out: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
            last[0] = last[0] if out[1] is None else out[1]
            return out[0], last[0]

        for layer in self.model.model.language_model.layers:
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.next_skip_topk = True
            layer.register_forward_hook(hand_on)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """The conditions every run needs: stable selections, and this instance's precision."""
        with stable_topk(), double_precision(self.double):
            yield

    def run(self, tokens: Array, mask: Array | None = None, pieces: list[int] | None = None) -> Run:
        """Runs tokens [batch, time], whole or in pieces of the given lengths through the reference's own
        cache.

        `mask` [batch, time] bool is False at left padding. A padding token must not be a piece of its own:
        the reference takes every one-token piece for real.
        """
        pieces = pieces or [tokens.shape[1]]
        if sum(pieces) != tokens.shape[1]:
            raise ValueError(f"pieces {pieces} do not add up to {tokens.shape[1]} tokens")
        cache = DynamicCache(config=self.text)
        layers = self.model.model.language_model.layers
        streams: list[list[Array]] = [[] for _ in layers]
        hidden: list[Array] = []
        logits: list[Array] = []
        start = 0
        with torch.no_grad(), self.exact(), contextlib.ExitStack() as hooks:
            for layer, store in zip(layers, streams, strict=True):
                hook = layer.register_forward_hook(
                    lambda _m, _a, out, store=store: store.append(out[0].numpy())
                )
                hooks.callback(hook.remove)
            for piece in pieces:
                stop = start + piece
                out = self.model.model(
                    input_ids=torch.tensor(tokens[:, start:stop]).long(),
                    attention_mask=None if mask is None else torch.tensor(mask[:, :stop]).long(),
                    cache=cache,
                    use_cache=True,
                )
                hidden.append(out.last_hidden_state.numpy())
                logits.append(self.model.lm_head(out.last_hidden_state).numpy())
                start = stop
        states = {
            index: cache.get_recurrent_state(index, state_idx=0).numpy()
            for index, kind in enumerate(self.text.layer_types)
            if kind == "linear_attention"
        }
        return Run(
            np.concatenate(logits, 1),
            np.concatenate(hidden, 1),
            [np.concatenate(s, 1) for s in streams],
            states,
        )

    def save_loss_gradients(self, tokens: Array, folder: Path) -> float:
        """Mean next-token cross entropy of tokens [batch, time]; its gradient is written as a checkpoint.

        transformers writes it in the names of the released layout; what has no gradient is written as zero.
        """
        self.model.zero_grad()
        ids = torch.tensor(tokens).long()
        with self.exact():
            logits = self.model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        self.model.save_pretrained(folder)
        return loss.item()

    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Greedy continuation by transformers' own `generate`, end tokens ignored."""
        self.model.generation_config.eos_token_id = None
        with torch.no_grad(), self.exact():
            out = self.model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()
