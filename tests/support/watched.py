"""Statements under watch: what they read, whatever the planner made of them."""

from __future__ import annotations

from sideline.ledger.sql import queries

# Tables that may be large.
BIG = {"events", "queues", "keys"}


class Watched:
    """A connection that has every statement explained, and remembers those that read too much."""

    def __init__(self, connection) -> None:
        self._connection = connection
        self.costly: list[str] = []
        self.statements = 0
        self.found = 0
        """Rows that the last statement found."""

    def cursor(self, **options):
        return Watched._Cursor(self, self._connection.cursor(**options))

    def execute(self, statement, named=None):
        return self.cursor().execute(statement, named)

    def look(self, statement, named) -> None:
        self.statements += 1
        (plan,) = self._connection.execute(
            "explain (analyze, timing off, format json) " + statement, named
        ).fetchone()
        self.found = max(node["Actual Rows"] for node in nodes(plan[0]["Plan"]))
        for node in nodes(plan[0]["Plan"]):
            seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            seen *= node["Actual Loops"]
            whole = node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG
            if whole or seen > 1_000:
                name = next(name for name, text in queries().items() if text == statement)
                self.costly.append(f"{name}: {node['Node Type']} of {seen} rows")

    class _Cursor:
        def __init__(self, watched, cursor) -> None:
            self._watched = watched
            self._cursor = cursor

        def execute(self, statement, named=None):
            self._watched.look(statement, named)
            return self._cursor.execute(statement, named)


def nodes(plan):
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)
