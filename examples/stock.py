"""A handler that reads before it writes: it gets the open transaction.

Needs:
    create table stock (item text primary key, pieces integer not null check (pieces >= 0));
    create table refused (sale text primary key, item text not null);
"""

from sideline import Event, Insert, Pipeline

stock = Pipeline("stock", topics="sales")


@stock.handler
def sell(event: Event, tx):
    sale = event.json()
    sold = tx.execute(
        "update stock set pieces = pieces - %(pieces)s"
        " where item = %(item)s and pieces >= %(pieces)s",
        sale,
    )
    if sold.rowcount == 0:
        return Insert("refused", {"sale": event.id, "item": sale["item"]})
    return None
