"""Writes tests/fixtures/oracle: tiny checkpoints and what the reference computes on them.

`make oracle` runs this; `make test` compares with the files and needs no torch. The values are those of the
reference in float64, so that they hold no rounding of their own.
"""

import shutil
from pathlib import Path

import numpy as np

from .cases import Case
from .mtp_reference import MtpReference
from .reference import Reference

FOLDER = Path(__file__).parents[1] / "fixtures" / "oracle"
LENGTHS, TIME = (40, 35, 18), 40
LAST = 6  # positions at the end of every row at which the wide arrays are kept
STEPS = 3
SIZES = (
    ("hidden_size", 32),
    ("intermediate_size", 40),
    ("moe_intermediate_size", 16),
    ("n_routed_experts", 8),
    ("num_experts_per_tok", 2),
    ("num_attention_heads", 2),
    ("num_key_value_heads", 2),
    ("q_lora_rank", 24),
    ("kv_lora_rank", 16),
    ("qk_nope_head_dim", 16),
    ("v_head_dim", 16),
)
CASES = {
    name: Case(name, regime, LENGTHS, TIME, SIZES)
    for name, regime in (("pool4", "plain"), ("pool16", "large"), ("shared", "ties"), ("softplus", "weak"))
}


def write(case: Case, folder: Path) -> None:
    """One checkpoint folder with expected.npz beside its shards."""
    shutil.rmtree(folder, ignore_errors=True)
    case.write(folder)
    tokens, mask = case.inputs()
    reference = Reference(folder, "float64")
    run = reference.run(tokens, mask)
    drafts = MtpReference(reference, folder).run(tokens, run.hidden, mask, STEPS)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens,
        mask=mask,
        logits=run.logits,
        streams=np.stack(run.streams)[:, :, -LAST:],
        kda_states=np.stack(list(run.states.values())),
        mtp_logits=drafts[:, :, -LAST - STEPS : -STEPS],
    )


def main() -> None:
    for name, case in CASES.items():
        write(case, FOLDER / name)
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER}: {len(CASES)} checkpoints, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
