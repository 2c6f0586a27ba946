"""Two simulated devices give the tokens of one through the whole engine, in float64."""

import json
import os
import subprocess
import sys


def test_two_devices_answer_as_one() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.float64.sharded_engine_run"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    answers = json.loads(run.stdout)
    assert answers["one"] == answers["two"]
    assert all(len(answer["tokens"]) == 12 for answer in answers["one"])
    assert len(answers["one"][2]["logprobs"]) == 12
    assert answers["one"][4]["tokens"] == answers["one"][0]["tokens"]
    assert answers["one"][4]["cached"] == 32
    assert all(20 <= token < 60 for token in answers["one"][3]["tokens"])
