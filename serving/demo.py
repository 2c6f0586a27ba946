"""`make demo`: a server of its own on a free port, one chat asked twice over HTTP, the answer printed."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

# What the shipped checkpoint was trained on; earlier turns make the prompt longer than a cache block.
CHAT = (
    ("user", "Mia has 7 books. Then Mia buys 5 more. How many books does Mia have now?"),
    ("assistant", "<think>First 7+5=12. So the answer is 12.</think>#### 12"),
    ("user", "Ben had 40 coins and sold 13 of them. How many coins are left?"),
    ("assistant", "<think>First 40-13=27. So the answer is 27.</think>#### 27"),
    ("user", "Tom has 12 apples. Then Tom buys 30 more. How many apples does Tom have now?"),
)
START_S = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(base: str, server: subprocess.Popen[bytes]) -> None:
    """Returns once /health answers 200. Raises RuntimeError if the server ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {START_S} s")


def ask(base: str, chat: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """One chat completion, its parsed body."""
    messages = [{"role": role, "content": content} for role, content in chat]
    body = {"messages": messages, "temperature": 0, "max_tokens": 128}
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def main(model: str) -> None:
    base = f"http://127.0.0.1:{(port := free_port())}"
    start = time.monotonic()
    command = [sys.executable, "-m", "glm_jax.serve", model, "--port", str(port)]
    limits = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--max-model-len", "1024"]
    limits.append("--enable-prompt-tokens-details")
    server = subprocess.Popen([*command, *limits])
    try:
        wait_until_healthy(base, server)
        print(f"{model} is served at {base} after {time.monotonic() - start:.1f} s")
        answer, again = ask(base, CHAT), ask(base, CHAT)
    finally:
        server.terminate()
        server.wait()
    choice = answer["choices"][0]
    print(f"question: {CHAT[-1][1]}")
    print(f"answer:   {choice['message']['content']}")
    print(f"          ({choice['finish_reason']}, {answer['usage']['completion_tokens']} tokens)")
    usage = again["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    same = "the same answer" if again["choices"][0]["message"] == choice["message"] else "another answer"
    print(f"again:    {same}, {cached} of {usage['prompt_tokens']} prompt tokens from the cache")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny")
