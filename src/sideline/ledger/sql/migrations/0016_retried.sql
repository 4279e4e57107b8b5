-- What a retry topic brought back is moved like what was released: it waited in no queue, and
-- nobody had to release it.
alter table sideline.resolved
    alter column queue drop not null,
    alter column operation drop not null;
