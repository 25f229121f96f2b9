"""What is said when an op of a plan cannot be computed. Touches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stretto.errors import RunError, StrettoError


@contextmanager
def telling_what_op_failed(rank: int) -> Iterator[None]:
    """What PyTorch raises for ops whose arguments do not fit each other, as in a plan that was edited: proofs
    of a plan do not know the rules of every operator."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        raise RunError(
            f"rank {rank} cannot compute what the plan says: {said}. An op does not fit its arguments, or "
            "needs more memory than there is: plan again from the model"
        ) from error
