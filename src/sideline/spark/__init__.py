"""The door for people who live in DataFrames: a session, and the ledger as DataFrames.

::

    from sideline import spark as sideline_spark

    spark = sideline_spark.session()
    sideline_spark.parked(spark, "login", decode="json").groupBy("error").count().show()
"""

from sideline.spark.frames import history, parked, progress
from sideline.spark.sessions import session

__all__ = ["history", "parked", "progress", "session"]
