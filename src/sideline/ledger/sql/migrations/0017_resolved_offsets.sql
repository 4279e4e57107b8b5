-- An index entry for every event that came back was a quarter of the price of its last step, and
-- hardly anybody asks for one of them by its offset. What came back at about the same time lies
-- together, so an index of pages says nearly as much, for next to nothing.
drop index sideline.resolved_by_offset;
create index resolved_by_offset on sideline.resolved using brin ("offset") with (pages_per_range = 32);
