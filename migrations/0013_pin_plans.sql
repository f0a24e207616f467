-- The tables of the queue are empty one minute and hold a million rows the next, and PL/pgSQL keeps its plans: one made
-- on an empty table would read the full one from end to end. Every statement of these functions has the index it
-- needs, so the plan is fixed to use it. Set on what is called from outside; what it calls runs under the same settings.
DO $$
DECLARE v_function regprocedure; v_setting text;
BEGIN
  FOR v_function IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname IN
      ('register', 'heartbeat', 'claim', 'closure', 'start_upload', 'give_back', 'fail', 'input_missing', 'log_append', 'deregister',
       'check_claim', 'accept', 'finish', 'give_up', 'resolve', 'reap', 'settle_missing', 'forget', 'known_closure') LOOP
    FOREACH v_setting IN ARRAY ARRAY['enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off',
                                     'plan_cache_mode = force_generic_plan'] LOOP
      EXECUTE format('ALTER FUNCTION %s SET %s', v_function, v_setting);
    END LOOP;
  END LOOP;
  -- A chunk's arrays are matched against each other by hashing, against tables by their indexes: planned for short arrays.
  FOR v_function IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname IN ('ingest', 'known') LOOP
    EXECUTE format('ALTER FUNCTION %s SET plan_cache_mode = force_generic_plan', v_function);
    EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', v_function);
  END LOOP;
END $$;
