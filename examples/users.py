"""Keep a table of users in step with the topic 'users'."""

from sideline import Delete, Event, Pipeline, Upsert

users = Pipeline("login", topics="users")


@users.handler
def login(event: Event):
    user = event.json()
    if user is None:
        return Delete("users", {"id": event.key.decode()})
    return Upsert("users", {"id": user["id"], "name": user["name"]}, key="id")
