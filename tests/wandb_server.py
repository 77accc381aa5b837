"""A stand-in for the W&B server, on loopback.

It knows as much of its interface as a run needs, and keeps losses by their ``_step``, as W&B shows them. What the real
server makes of it cannot be tested without an account.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def on_disk(folder: Path) -> list[dict[str, Any]]:
    """What was logged, from W&B's own file in a run's folder, by W&B's own reader."""
    (first, *others) = sorted(folder.glob("wandb/*run-2*"))
    assert all(other.name.startswith("run-") for other in others)
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(first)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    records = [json.loads(line) for line in text.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.behaviour, self.where = "answers", ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def turn(self, behaviour: str, where: str = "") -> None:
        """From now on, behave so to requests whose path ends with ``where``."""
        self.behaviour, self.where = behaviour, where

    def losses(self, run_id: str) -> list[float]:
        """The losses of a run in the order of their steps, which have no gap."""
        history = self.runs[run_id]["history"]
        assert sorted(history) == list(range(len(history)))
        return [history[step]["jax/loss"] for step in sorted(history)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of a test."""

    def graphql(self, query: str, asked: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            run = self.runs.setdefault(asked["name"], {"history": {}, "config": {}, "exit_code": None})
            run["config"] |= json.loads(asked["config"])
            project = {"id": "p", "name": asked["project"], "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": asked["name"], "project": project, "historyLineCount": len(run["history"])}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}
        return {}

    def file_stream(self, run: dict[str, Any], sent: dict[str, Any]) -> None:
        for name, chunk in sent.get("files", {}).items():
            lines = [json.loads(line) for line in chunk["content"]]
            if name == "wandb-history.jsonl":
                for line in lines:
                    assert run["history"].setdefault(line["_step"], line)["jax/loss"] == line["jax/loss"]
            elif name == "wandb-summary.json":
                run["summary"] = lines[-1]
        run["exit_code"] = sent.get("exitcode", run["exit_code"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class calls it so
        """Nothing to print."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(self.path)
        status, said = 200, {}
        behaviour = self.server.behaviour if self.path.endswith(self.server.where) else "answers"
        if behaviour == "hangs":
            time.sleep(3600)
        elif behaviour == "dribbles":
            for byte in b"HTTP/1.1 200 OK\r\nX-Padding: " + b"a" * 3600:
                self.wfile.write(bytes([byte]))
                time.sleep(1)
        elif behaviour == "cuts off":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        elif behaviour == "fails":
            status = 500
        elif behaviour == "forbids":
            status, said = 403, {"errors": [{"message": "permission denied"}]}
        elif self.path.endswith("/graphql") and body:
            asked = json.loads(body)
            said = {"data": self.server.graphql(asked["query"], asked["variables"])}
        elif self.path.endswith("/file_stream"):
            self.server.file_stream(self.server.runs[self.path.split("/")[-2]], json.loads(body))
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST  # noqa: N815 - the base class looks for these names
