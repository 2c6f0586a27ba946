"""An MTP reference composed from transformers' own modules; transformers ignores the MTP weights of a
checkpoint.

Row t of step s is fed the embedding of token t + 1 + s and, for s = 0, the target's hidden state after the
final norm at t, for s >= 1 the row's own output of step s - 1 (after the layer's last norm). It then is at
position t + s. Sequence t of step s >= 1 sees the latents that step 0 wrote for positions 0..t and, when
the indexer runs again, those that its own earlier steps wrote for t + 1..t + s: here simply a sequence of
its own, run whole.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextAttention,
    Glm5NextTextMoE,
    Glm5NextTextRMSNorm,
)

from .reference import Reference

Array = np.ndarray


class MtpReference(torch.nn.Module):
    """The MTP layer of one checkpoint folder, sharing embedding, head and precision with `reference`."""

    def __init__(self, reference: Reference, folder: Path):
        super().__init__()
        self.reference = [reference]  # in a list, so that its weights are not registered here a second time
        text = reference.text
        index, hidden, eps = text.num_hidden_layers, text.hidden_size, text.rms_norm_eps
        self.reuse_selection = getattr(text, "index_share_for_mtp_iteration", True)
        config = type(text).from_dict(text.to_dict())
        config.indexer_types = [*text.indexer_types, "full"]
        config.layer_types = [*text.layer_types, "indexed_attention"]
        config.mlp_layer_types = [*text.mlp_layer_types, "sparse"]
        config._attn_implementation = config._experts_implementation = "eager"

        self.enorm = Glm5NextTextRMSNorm(hidden, eps)
        self.hnorm = Glm5NextTextRMSNorm(hidden, eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = Glm5NextTextRMSNorm(hidden, eps)
        self.self_attn = Glm5NextTextAttention(config, index)
        self.post_attention_layernorm = Glm5NextTextRMSNorm(hidden, eps)
        self.mlp = Glm5NextTextMoE(config)
        self.shared_head = torch.nn.ModuleDict({"norm": Glm5NextTextRMSNorm(hidden, eps)})

        tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(shard)
        prefix = f"model.language_model.layers.{index}."
        own = {k.removeprefix(prefix): v.float() for k, v in tensors.items() if k.startswith(prefix)}
        gates = [own.pop(f"mlp.experts.{e}.gate_proj.weight") for e in range(text.n_routed_experts)]
        ups = [own.pop(f"mlp.experts.{e}.up_proj.weight") for e in range(text.n_routed_experts)]
        downs = [own.pop(f"mlp.experts.{e}.down_proj.weight") for e in range(text.n_routed_experts)]
        own["mlp.experts.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
        own["mlp.experts.down_proj"] = torch.stack(downs)
        self.load_state_dict(own, strict=True)
        self.eval()
        if reference.double:
            self.double()

    def _inputs(self, tokens: torch.Tensor, previous: torch.Tensor, step: int) -> torch.Tensor:
        """eh_proj over one sequence: row t takes the token at t + 1 + step (the last rows wrap, unused)."""
        embedded = self.reference[0].model.get_input_embeddings()(tokens.roll(-1 - step))
        if step == 0:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(previous)], dim=-1))

    def _attend(self, rows: torch.Tensor, selection: torch.Tensor | None = None) -> torch.Tensor:
        """The attention module over one sequence [rows, D], its indexer replaced by `selection` if given."""
        mask = torch.ones(1, rows.shape[0], dtype=torch.bool)
        indexer = self.self_attn.indexer
        try:
            if selection is not None:
                self.self_attn.indexer = None
            out = self.self_attn(rows[None], attention_mask=mask, prev_topk_indices=selection)
        finally:
            self.self_attn.indexer = indexer
        return out[0][0]

    def _sequence(self, tokens: torch.Tensor, hidden: torch.Tensor, steps: int) -> torch.Tensor:
        """Logits [steps, time, vocab] of one sequence without padding."""
        time = tokens.shape[0]
        chosen: list[torch.Tensor] = []
        chains: list[torch.Tensor] = []  # what each step fed to the attention, [time, D] a step
        logits = []
        for step in range(steps):
            residual = self._inputs(tokens, hidden, step)
            rows = self.input_layernorm(residual)
            chains.append(rows)
            if step == 0:
                hook = self.self_attn.indexer.register_forward_hook(lambda _m, _a, out: chosen.append(out))
                attended = self._attend(rows)
                hook.remove()
            elif self.reuse_selection:
                # Queries of this step behind the keys of step 0, each with the selection of its step 0 row.
                nothing = torch.full_like(chosen[0], -1)
                selection = torch.cat([nothing, chosen[0]], dim=1)
                attended = self._attend(torch.cat([chains[0], rows]), selection)[time:]
            else:
                attended = torch.stack(
                    [
                        self._attend(torch.cat([chains[0][: t + 1], *(c[t : t + 1] for c in chains[1:])]))[-1]
                        for t in range(time)
                    ]
                )
            after = residual + attended
            block = after + self.mlp(self.post_attention_layernorm(after)[None])[0]
            hidden = self.shared_head["norm"](block)
            logits.append(self.reference[0].model.lm_head(hidden))
        return torch.stack(logits)

    def run(self, tokens: Array, hidden: Array, mask: Array | None = None, steps: int = 3) -> Array:
        """Teacher-forced drafts: tokens [batch, time], hidden [batch, time, D] -> [steps, batch, time,
        vocab].

        Row t of step s predicts token t + 2 + s; rows whose token t + 1 + s does not exist are left at
        zero, as are those at padding (`mask` [batch, time] False on the left).
        """
        text = self.reference[0].text
        out = np.zeros((steps, *tokens.shape, text.vocab_size), hidden.dtype)
        with torch.no_grad(), self.reference[0].exact():
            for row in range(tokens.shape[0]):
                start = 0 if mask is None else int(mask[row].argmax())
                logits = self._sequence(
                    torch.tensor(tokens[row, start:]).long(), torch.tensor(hidden[row, start:]), steps
                ).numpy()
                for step in range(steps):
                    known = tokens.shape[1] - start - 1 - step
                    if known > 0:
                        out[step, row, start : start + known] = logits[step, :known]
        return out
