"""Structured Streaming with foreachBatch: JDBC into an unlogged stage, then one merge.

Tuned: rows parsed in the JVM, rewritten batched inserts, no wait for the disk while staging,
the stage truncated in the merge's own transaction, few large batches while behind.
"""

from __future__ import annotations

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from bench.peers import spark, task


def main() -> None:
    """Apply the topic to the table that the task names."""
    given = task()
    session = spark.session(given)
    kind = given.options.get("kind", "users")
    url, properties = spark.jdbc(given.database)
    connection = psycopg.connect(given.database)
    connection.execute(STAGES[kind])
    connection.commit()

    def apply(batch: DataFrame) -> int:
        counted = Observation()
        parsed = batch.select(
            f.from_json(f.col("value").cast("string"), SCHEMAS[kind]).alias("v"),
            "partition",
            "offset",
        ).select("v.*", f.col("partition").alias("kp"), f.col("offset").alias("ko"))
        (
            parsed.observe(counted, f.count(f.lit(1)).alias("events"))
            .write.mode("append")
            .option("batchsize", 10_000)
            .option("reWriteBatchedInserts", "true")
            .option("options", "-c synchronous_commit=off")
            .options(**properties)
            .jdbc(url, "stage")
        )
        connection.execute(MERGES[kind])
        connection.execute("truncate stage")
        connection.commit()
        return int(counted.get["events"])

    spark.run(given, spark.source(session, given), apply)


SCHEMAS = {"users": spark.VALUE, "latency": "part int, seq long, name string"}
STAGES: dict[str, sql.SQL] = {
    "users": sql.SQL(
        "create unlogged table stage (id text, name text, email text, seq int8, kp int, ko int8)"
    ),
    "latency": sql.SQL(
        "create unlogged table stage (part int, seq int8, name text, kp int, ko int8)"
    ),
}
MERGES: dict[str, sql.SQL] = {
    "users": sql.SQL("""
insert into users (id, name, email, seq)
select distinct on (id) id, name, email, seq
from stage
order by id, ko desc
on conflict (id) do update
set name = excluded.name, email = excluded.email, seq = excluded.seq
"""),
    "latency": sql.SQL("""
insert into effects (part, seq, name)
select distinct on (part, seq) part, seq, name
from stage
order by part, seq, ko desc
on conflict (part, seq) do update
set name = excluded.name
"""),
}


if __name__ == "__main__":
    main()
