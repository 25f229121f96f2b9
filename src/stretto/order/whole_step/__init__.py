"""Steps in which each rank has one window: the ops of all ranks and microbatches ordered together."""

from stretto.order.whole_step.search import order_together

__all__ = ["order_together"]
