"""The page and what it asks for, over HTTP."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from minirl.jsonl import to_json
from minirl.view.files import RunFiles

FOLDER = Path(__file__).parent
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
LOCAL = ("localhost", "127.0.0.1", "::1")


class PageServer(ThreadingHTTPServer):
    """Serves one run; it only answers those who name it as it was named to them."""

    daemon_threads = True

    def __init__(self, host: str, port: int, files: RunFiles) -> None:
        """Raises OSError when the address cannot be had."""
        super().__init__((host, port), _Handler)
        self.names = {host, *LOCAL} if host in LOCAL else None
        """A page from elsewhere whose name leads here (DNS rebinding) does not know them. None: any
        will do."""
        self.answers: dict[str, Callable[[dict[str, str]], Any]] = {
            "/api/run": lambda _: files.overview(),
            "/api/metric": lambda asked: files.metric(asked["name"]),
            "/api/step": lambda asked: files.step(int(asked["step"])),
            "/api/trajectory": lambda asked: files.trajectory(
                int(asked["step"]), int(asked["index"])
            ),
        }

    @property
    def url(self) -> str:
        """For the browser."""
        return f"http://{self.server_name}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        """A file of the page, or JSON."""
        asked = urlsplit(self.path)
        names = self.server.names
        if names is not None and urlsplit(f"//{self.headers['Host']}").hostname not in names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for localhost")
        elif asked.path in PAGES:
            file = FOLDER / PAGES[asked.path]
            self._answer(HTTPStatus.OK, KINDS[file.suffix], file.read_bytes())
        elif asked.path in self.server.answers:
            options = {name: values[0] for name, values in parse_qs(asked.query).items()}
            self._answer_json(self.server.answers[asked.path], options)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such page")

    def _answer_json(
        self, answer: Callable[[dict[str, str]], Any], options: dict[str, str]
    ) -> None:
        try:
            status, value = HTTPStatus.OK, answer(options)
        except (LookupError, ValueError, OSError) as error:
            value = {"error": f"{type(error).__name__}: {error}"}
            status = HTTPStatus.NOT_FOUND
        self._answer(status, "application/json", to_json(value).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'self'; img-src data:")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line per request."""
