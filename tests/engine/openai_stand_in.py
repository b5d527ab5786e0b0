"""A small server that speaks as much of the OpenAI protocol as a load client needs, at a set pace."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "stand-in"
# Arguments of a short run.
QUICK = {"num_prompts": 4, "num_warmups": 0, "max_tokens": 6}


@dataclass
class StandIn:
    """How it answers, and what it saw. Seconds before the first token, and before each further one."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 3
    tokens_per_chunk: int = 1
    usage: bool = True
    key: str | None = None
    models: tuple[str, ...] = (MODEL,)
    # Of the requests in their order of arrival, those that fail, and how.
    refused: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    # A last piece without text, for an end-of-sequence token, so many seconds after the last text.
    silent_end_s: float | None = None
    # A line that is none of the answer, again and again, in the place of its tokens.
    keeps_alive: bool = False
    counts: int | None = None  # tokens of an answer, where it counts otherwise than it sends
    # What an answer is made inside of.
    around_answer: Callable[[], AbstractContextManager] = nullcontext
    # Requests wait until so many are there.
    together: int | None = None
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight: int = 0
    guard: threading.Condition = field(default_factory=threading.Condition)

    def enter(self, path: str, body: dict) -> int:
        """Count a request in; returns its number."""
        with self.guard:
            self.paths.append(path)
            self.bodies.append(body)
            number = len(self.bodies) - 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.guard.notify_all()
            if self.together is not None:
                self.guard.wait_for(lambda: self.most_in_flight >= self.together, timeout=2)
            return number

    def leave(self) -> None:
        with self.guard:
            self.in_flight -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.allowed() and self.found(self.path == "/v1/models"):
            entries = [{"id": name, "object": "model", "owned_by": "tests"} for name in self.stand_in.models]
            self.answer(200, {"object": "list", "data": entries})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed() or not self.found(self.path in ("/v1/completions", "/v1/chat/completions")):
            return
        number = self.stand_in.enter(self.path, body)
        try:
            if number in self.stand_in.refused:
                self.answer(500, {"error": {"message": "out of memory"}})
            else:
                # A client that has given up is gone in the midst of its answer.
                with self.stand_in.around_answer(), suppress(ConnectionError):
                    self.stream(number, body)
        finally:
            self.stand_in.leave()

    def allowed(self) -> bool:
        key = self.stand_in.key
        ok = key is None or self.headers["Authorization"] == f"Bearer {key}"
        if not ok:
            self.answer(401, {"error": {"message": "Unauthorized"}})
        return ok

    def found(self, known: bool) -> bool:
        if not known:
            self.answer(404, {"error": {"message": "no such path"}})
        return known

    def answer(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, number: int, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while self.stand_in.keeps_alive:
            time.sleep(0.02)
            self.wfile.write(b"b\r\n: nothing\n\n\r\n")
            self.wfile.flush()
        for piece in self.pieces(number, body):
            data = f"data: {piece if isinstance(piece, str) else json.dumps(piece)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def pieces(self, number: int, body: dict) -> Iterator[dict | str]:
        at = self.stand_in
        chat = self.path.endswith("/chat/completions")
        if chat:  # vLLM and others open with the role, before there is a token
            yield _piece(chat, "", role="assistant")
        chunks = -(-at.tokens // at.tokens_per_chunk)
        for i in range(chunks):
            time.sleep(at.ttft_s if i == 0 else at.tpot_s * at.tokens_per_chunk)
            if number in at.broken and i == 1:
                yield {"error": {"message": "the engine died", "code": 500}}
                return
            if number in at.cut and i == 1:
                return
            last = i == chunks - 1 and at.silent_end_s is None
            yield _piece(chat, "token " * at.tokens_per_chunk, "length" if last else None)
        if at.silent_end_s is not None:
            time.sleep(at.silent_end_s)
            yield _piece(chat, "", "stop")
        if at.usage and (body.get("stream_options") or {}).get("include_usage"):
            yield {
                "object": "chunk",
                "choices": [],
                "usage": {"prompt_tokens": 7, "completion_tokens": at.counts or at.tokens},
            }
        yield "[DONE]"


def _piece(chat: bool, text: str, finish_reason: str | None = None, role: str | None = None) -> dict:
    choice = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": {"content": text} | ({"role": role} if role else {})} if chat else {"text": text}
    return {"object": "chunk", "model": MODEL, "choices": [choice]}


@contextmanager
def running(**settings: object) -> Iterator[StandIn]:
    """A stand-in on a free port of this machine, at `.url`."""
    stand_in = StandIn(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stand_in": stand_in}))
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
