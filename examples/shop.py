"""Publishes what happens in a shop: each order's events in order, none lost without a word.

Run it with: python examples/shop.py orders
"""

import sys

from sideline import Publisher
from sideline.errors import NotDeliveredError

ORDERS = [
    {"id": 1, "state": "open", "total": 10.5, "version": 1},
    {"id": 2, "state": "open", "total": 3.0, "version": 1},
    {"id": 1, "state": "paid", "total": 10.5, "version": 2},
]


def main(topic: str) -> int:
    try:
        with Publisher() as publisher:
            for order in ORDERS:
                # The key keeps an order's events in their order.
                last = publisher.publish(topic, order, key=str(order["id"]))
            print("the last one is at", last.result(30))
            publisher.publish(topic, None, key="2")  # a tombstone: order 2 is no more
    except NotDeliveredError as error:
        print(error.message, [handle.key for handle in error.failures], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
