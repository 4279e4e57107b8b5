"""Orders with a version guard: an older event never replaces a newer row.

Needs:
    create table orders (
        id bigint primary key, state text not null, total numeric(12, 2), version bigint
    );
"""

from sideline import Delete, Event, Pipeline, Upsert

orders = Pipeline(
    "billing",
    topics=("orders", "orders-imported"),
    # Checked when the pipeline starts: the table, its columns and its unique index.
    effects=[
        Upsert("orders", {"id": 0, "state": "", "total": 0, "version": 0}, "id", "version"),
        Delete("orders", {"id": 0}),
    ],
)


@orders.handler
def keep(event: Event):
    order = event.json()
    if order is None:
        return Delete("orders", {"id": int(event.key)})
    if order["state"] == "draft":
        return None  # counted as filtered
    row = {name: order[name] for name in ("id", "state", "total", "version")}
    return Upsert("orders", row, key="id", version="version")
