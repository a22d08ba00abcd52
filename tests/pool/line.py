"""Pickled objects over a Unix socket, each after its length."""
import pickle


class Line:
    """One end of a connected socket.  take() raises EOFError when the other end has gone."""

    def __init__(self, socket):
        self.socket = socket

    def fileno(self):
        return self.socket.fileno()

    def give(self, thing):
        data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
        self.socket.sendall(len(data).to_bytes(8, "little") + data)

    def take(self):
        return pickle.loads(self._exactly(int.from_bytes(self._exactly(8), "little")))

    def _exactly(self, nbytes) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self.socket.recv(min(nbytes - len(data), 1 << 20))
            if not part:
                raise EOFError("the other end has gone")
            data += part
        return bytes(data)
