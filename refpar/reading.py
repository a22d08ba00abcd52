"""The text to train on: a file's, or the one that every CPython carries; what cannot be read is refused in one sentence."""
from __future__ import annotations

from pathlib import Path

from refpar.corpus import Corpus, split


def load(path: str | Path | None, sequence: int) -> Corpus:
    """The corpus of a file, or of the default text (None), long enough for windows of `sequence` tokens."""
    if path is None:
        return split("the Python language reference", python_reference(), sequence)
    return split(str(path), read_documents(path), sequence)


def python_reference() -> list[bytes]:
    """The default text: the topics of the Python language reference that every CPython carries, sorted by name.

    Many a topic is a section of a longer one.  A topic that stands whole in another is left out, else what is held out
    would have been read in training.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("text: this Python comes without pydoc_data.topics, the default text; name a text file instead") from None
    bodies = {name: _body(topics[name]) for name in sorted(topics)}
    return [topics[name].encode() for name, body in bodies.items()
            if not any(body in other and (len(body), name) < (len(other), of) for of, other in bodies.items())]


def _body(topic: str) -> str:
    """A topic without its heading, whose underline depends on the depth of the section."""
    return topic.partition("\n\n")[2].strip()


def read_documents(path: str | Path) -> list[bytes]:
    """The documents of a text file: UTF-8, and a form feed, where there is one, separates two documents."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"text: {path} is a directory, and must be a file of UTF-8 text")
    if path.exists() and not path.is_file():
        raise ValueError(f"text: {path} is no regular file, and must be a file of UTF-8 text")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"text: the file {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"text: the file {path} cannot be read ({error.strerror})") from None
    if 0 in content:
        raise ValueError(f"text: {path} is binary (byte {content.index(0)} is NUL), and must be UTF-8 text")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is binary (byte {error.start} is not UTF-8), and must be UTF-8 text") from None
    documents = [document for document in content.split(b"\f") if document]
    if not documents:
        raise ValueError(f"text: the file {path} is empty ({len(content)} bytes)")
    return documents
