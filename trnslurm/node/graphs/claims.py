"""Who compiles a key: two submissions of one cold key at the same moment become one compilation.

CACHE/trnslurm/KEY/claim-1.json    the highest number counts (trnslurm/node/claims.py)
"""

from collections.abc import Collection
from pathlib import Path

from trnslurm.node.claims import Claim, Holder, newest_in, take_next
from trnslurm.node.graphs.manifest import (
    foreign_place,
    is_trusted,
    key_dir,
    mode_for_others,
    refuse_place,
)


def newest_claim(cache: Path, key: str) -> Claim | None:
    """Return the claim of a key that counts; None if there is none."""
    return newest_in(key_dir(cache, key))


def take_claim(
    cache: Path, key: str, holder: Holder, *, after: Claim | None, trusted: Collection[int] = ()
) -> Claim | None:
    """Take the claim that follows a stale one; None if another process was faster."""
    return take_next(open_key_dir(cache, key, trusted=trusted), holder, after, readers=cache)


def open_key_dir(cache: Path, key: str, *, trusted: Collection[int] = ()) -> Path:
    """Make a key's directory, as open to others as the cache itself; refuse that of others."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = key_dir(cache, key)
    all_keys = cache.stat().st_mode & 0o3777  # everybody who may write to the cache adds keys
    for place, mode in ((directory.parent, all_keys), (directory, mode_for_others(cache))):
        try:
            place.mkdir()
            place.chmod(mode)
        except FileExistsError:
            pass
        except PermissionError:
            for above in (cache, place.parent):
                if not is_trusted(uid := above.stat().st_uid, trusted):
                    raise foreign_place(above, uid) from None
            raise
        refuse_place(place, trusted, cache)
    return directory
