"""The layout rules, and loading over two simulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from glm_jax import params
from glm_jax.config import load_config
from glm_jax.sharding import EXPERT_PARALLEL, TENSOR_PARALLEL, partition_spec

FIXTURE = Path(__file__).parents[1] / "fixtures" / "glm5_3_flash_config.json"
SCRIPT = Path(__file__).with_name("two_device_checks.py")
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for line in SCRIPT.read_text().splitlines()
    if line.startswith("def check_")
]


@pytest.fixture(scope="module")
def specs() -> dict[str, params.ParameterSpec]:
    return params.named_leaves(params.abstract(load_config(FIXTURE)), params.is_spec)


# MODEL.md g: shape of each rank's part at TP8; leaves that are not here are whole on every rank.
TP8 = {
    "embed_tokens": (19360, 4096),
    "lm_head": (19360, 4096),
    "layers.0.attention.qkv_proj": (3, 1024, 4096),
    "layers.0.attention.conv": (3, 1024, 4),
    "layers.0.attention.f_b": (1024, 128),
    "layers.0.attention.g_b": (1024, 128),
    "layers.0.attention.dt_bias": (1024,),
    "layers.0.attention.A_log": (8,),
    "layers.0.attention.b_proj": (8, 4096),
    "layers.0.attention.o_proj": (4096, 1024),
    "layers.0.mlp.gate_up": (2, 1536, 4096),
    "layers.0.mlp.down": (4096, 1536),
    "layers.3.attention.q_b_proj": (2048, 1536),
    "layers.3.attention.k_b": (8, 256, 512),
    "layers.3.attention.v_b": (8, 256, 512),
    "layers.3.attention.o_proj": (4096, 2048),
    "layers.3.mlp.gate_up": (288, 2, 256, 4096),
    "layers.3.mlp.down": (288, 4096, 256),
    "layers.3.mlp.shared.gate_up": (2, 256, 4096),
    "layers.3.mlp.shared.down": (4096, 256),
}


def local_shape(spec: params.ParameterSpec, rules: dict) -> tuple[int, ...]:
    return tuple(
        size // 8 if axis else size
        for size, axis in zip(spec.shape, partition_spec(spec, rules), strict=True)
    )


def test_tensor_parallel_layout_of_the_released_model(specs: dict) -> None:
    for path, spec in specs.items():
        if path.split(".")[:2] in (["layers", "0"], ["layers", "3"]) or not path.startswith(
            ("layers", "mtp")
        ):
            assert local_shape(spec, TENSOR_PARALLEL) == TP8.get(path, spec.shape), path
    for name in ("enorm", "hnorm", "eh_proj", "norm"):
        assert local_shape(specs[f"mtp.{name}"], TENSOR_PARALLEL) == specs[f"mtp.{name}"].shape
    assert local_shape(specs["mtp.mlp.down"], TENSOR_PARALLEL) == TP8["layers.3.mlp.down"]


def test_expert_parallel_differs_in_the_routed_experts_alone(specs: dict) -> None:
    for path, spec in specs.items():
        different = partition_spec(spec, EXPERT_PARALLEL) != partition_spec(spec, TENSOR_PARALLEL)
        assert different == ("experts" in spec.axes), path
    assert local_shape(specs["layers.3.mlp.gate_up"], EXPERT_PARALLEL) == (36, 2, 2048, 4096)


def test_released_fp8_leaves_keep_their_blocks_at_tp8(specs: dict) -> None:
    for path, spec in specs.items():
        if spec.dtype == "F8_E4M3":
            assert all(
                size % 128 == 0
                for size, axis in zip(
                    local_shape(spec, TENSOR_PARALLEL), partition_spec(spec, TENSOR_PARALLEL), strict=True
                )
                if axis
            ), path


def test_rules_that_cannot_be(specs: dict) -> None:
    spec = specs["layers.3.mlp.down"]
    assert partition_spec(spec, TENSOR_PARALLEL) == PartitionSpec(None, None, "tp")
    with pytest.raises(ValueError, match="one mesh axis twice"):
        partition_spec(spec, {**TENSOR_PARALLEL, "experts": "tp"})
    with pytest.raises(ValueError, match=r"no sharding rule for logical axes \['experts'\]"):
        partition_spec(spec, {name: axis for name, axis in TENSOR_PARALLEL.items() if name != "experts"})


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """The number of devices is fixed when jax starts, so these checks need another process."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **devices},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_devices(results: dict[str, str], check: str) -> None:
    assert results[check] == "ok", results[check]
