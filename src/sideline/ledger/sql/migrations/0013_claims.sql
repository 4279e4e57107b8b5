-- Message ids of slices that are not decided yet.

alter table sideline.progress
    -- The transaction that wrote what is pending. The ids that it stored are its own: nobody takes
    -- them for applied before the slice is, and they go with it if it is dropped.
    add column pended_by xid8,
    add column pended_at timestamptz;
