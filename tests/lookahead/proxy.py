"""python proxy.py PORT TARGET CONTROL [CERTIFICATE KEY]: forwards connections to a Redis server on this machine.

The file CONTROL says what is done to them: nothing, "delay SECONDS" before each request goes on, or "corrupt": one bit of
every longer reply is flipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from pathlib import Path


async def serve(port: int, target: int, control: Path, files: list[str]) -> None:
    context = None
    if files:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*files)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while chunk := await reader.read(1 << 16):
                what = control.read_text().split()
                if what[:1] == ["delay"] and not reply:
                    await asyncio.sleep(float(what[1]))
                if what[:1] == ["corrupt"] and reply and len(chunk) > 300:
                    middle = len(chunk) // 2
                    chunk = chunk[:middle] + bytes([chunk[middle] ^ 4]) + chunk[middle + 1 :]
                writer.write(chunk)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, forth, False), pump(back, writer, True))

    server = await asyncio.start_server(connect, "127.0.0.1", port, ssl=context)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
