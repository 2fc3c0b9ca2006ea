"""Users of a page with passwords (basic authentication)."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

KNOWN_S = 600.0  # how long a correct password is cached, since hashing takes long
MOST_KNOWN = 100  # right passwords that are known


class PasswordChecks:
    """Checks passwords against bcrypt hashes, off the event loop and one at a time, since each takes a while."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "passwords")
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, float] = {}  # digest of a right user, hash and password: until when it is known

    async def is_right(self, users: Mapping[str, str], user: str, password: str) -> bool:
        """Whether the user exists and this is the password. For an unknown user it takes as long as for another."""
        if not users:
            return False
        expected = users.get(user) or next(iter(users.values()))
        digest, now = self._digest(user, expected, password), time.monotonic()
        if self._known.get(digest, 0.0) <= now:
            matches = await asyncio.get_running_loop().run_in_executor(self._thread, _matches, password, expected)
            if not matches or user not in users:
                return False
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
        self._known[digest] = now + KNOWN_S
        return True

    def _digest(self, *texts: str) -> bytes:
        """Keyed digest of user, hash and password; moving characters between the three changes it."""
        found = hashlib.blake2b(key=self._key)
        for text in texts:
            found.update(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), key=self._key).digest())
        return found.digest()


def _matches(password: str, expected: str) -> bool:
    import bcrypt  # lazy: only pages with users need it

    try:
        # Only 72 bytes ever counted, and newer versions refuse more.
        return bcrypt.checkpw(password.encode("utf-8", "surrogateescape")[:72], expected.encode("ascii"))
    except ValueError:
        return False
