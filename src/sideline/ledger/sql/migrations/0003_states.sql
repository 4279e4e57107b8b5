-- What else may become of an event that failed, counted like everything else.
alter table sideline.progress
    -- On its way through retry topics; copied to the dead-letter topic; given up by a person.
    add column retrying bigint not null default 0 check (retrying >= 0),
    add column dead bigint not null default 0 check (dead >= 0),
    add column discarded bigint not null default 0 check (discarded >= 0),
    drop constraint accounting,
    add constraint accounting
        check (
            consumed = applied + filtered + skipped + unknown + parked + retrying + dead + discarded
        );
