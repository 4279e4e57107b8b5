"""From topic to topic, exactly once: every order that is paid becomes a parcel to be packed.

Needs the topics orders and parcels in one cluster, and PostgreSQL for the ledger
(SIDELINE_DATABASE). No tables of your own.
"""

import orjson

from sideline import Event, Kafka, Pipeline, Publish

parcels = Pipeline("parcels", topics="orders", sink=Kafka())


@parcels.handler
def pack(event: Event):
    order = event.json()
    if order["state"] != "paid":
        return None  # counted as filtered
    parcel = {"order": order["id"], "lines": len(order["lines"])}
    # The same key, so that the parcels of an order stay in order, too.
    return Publish("parcels", orjson.dumps(parcel), key=event.key)
