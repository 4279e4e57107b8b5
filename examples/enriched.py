"""JSON is parsed by Spark before the handler; drafts are left out there.

Needs: create table users (id text primary key, name text);
"""

from pyspark.sql import functions as f

from sideline import Delete, Event, Pipeline, Upsert


def enrich(df):
    user = f.from_json(df.value.cast("string"), "id string, name string, state string")
    return df.withColumn("user", user).where("user.state is null or user.state <> 'draft'")


enriched = Pipeline("enriched", topics="users", prepare=enrich)


@enriched.handler
def login(event: Event):
    user = event.row["user"]
    if user is None:  # an event without a value: the user is gone
        return Delete("users", {"id": event.key.decode()})
    return Upsert("users", {"id": user["id"], "name": user["name"]}, key="id")
