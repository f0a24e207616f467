-- Evaluations that wait for an evaluator. A claim is a lease: whoever stops keeping it is taken for dead, and the next
-- claim takes over. Until then, and while it is evaluated again, what it has ingested goes on being built: the same
-- derivations come again, and are known.

CREATE FUNCTION ci.evaluation_lease() RETURNS interval LANGUAGE sql IMMUTABLE AS $$ SELECT interval '60 seconds' $$;

-- The next one: of the project with the fewest being evaluated, the oldest. No row: there is none.
CREATE FUNCTION ci.claim_evaluation(p_evaluator text)
  RETURNS TABLE (id bigint, attempt int, project text, source text, branch text, commit_id text, tier smallint, attrs text[])
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE v_now timestamptz := ci.clock(); v_id bigint;
BEGIN
  PERFORM ci.end_evaluation(e.id, 'aborted', format('its evaluator went away %s times before it was done, the last time %s: '
      'it may need more memory than there is; `re-evaluate` tries again', e.attempt, e.evaluator))
  FROM ci.evaluation e WHERE e.state = 'evaluating' AND e.lease_until < v_now AND e.attempt >= 3;    -- fence: evaluated_thrice
  SELECT e.id INTO v_id FROM ci.evaluation e JOIN ci.project p ON p.id = e.project_id
  WHERE (e.state = 'queued' OR e.state = 'evaluating' AND e.lease_until < v_now)            -- fence: evaluation_lease
    AND NOT p.paused                                                                        -- fence: evaluation_paused
  ORDER BY (SELECT count(*) FROM ci.evaluation o WHERE o.state = 'evaluating' AND o.lease_until >= v_now AND o.project_id = e.project_id), e.id
  LIMIT 1 FOR NO KEY UPDATE OF e SKIP LOCKED;                                               -- lock: claim_evaluation
  IF NOT FOUND THEN RETURN; END IF;
  RETURN QUERY UPDATE ci.evaluation e SET state = 'evaluating', evaluator = p_evaluator, attempt = e.attempt + 1, secret_hash = NULL,
      started_at = v_now, lease_until = v_now + ci.evaluation_lease()
    FROM ci.project p WHERE e.id = v_id AND p.id = e.project_id
    RETURNING e.id, e.attempt, p.name, e.source, e.branch, e.commit_id, e.tier, e.attrs;
END $$;

-- It goes on, and says which commit it found. False: it is not the caller's any more, or was cancelled: stop.
CREATE FUNCTION ci.keep_evaluation(p_evaluation bigint, p_attempt int, p_commit text DEFAULT NULL) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE ci.evaluation SET lease_until = ci.clock() + ci.evaluation_lease(), commit_id = coalesce(p_commit, commit_id)
  WHERE id = p_evaluation AND state = 'evaluating'
    AND attempt = p_attempt;                                                                -- fence: evaluation_attempt
  RETURN FOUND;
END $$;

-- An evaluator that stops, or starts anew under its name: what it had is anybody's. p_kindly: it says so itself, so that no
-- attempt is lost.
CREATE FUNCTION ci.release_evaluations(p_evaluator text, p_kindly bool) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_count int;
BEGIN
  UPDATE ci.evaluation SET lease_until = '-infinity', attempt = attempt - p_kindly::int
  WHERE state = 'evaluating' AND evaluator = p_evaluator AND lease_until > '-infinity';
  GET DIAGNOSTICS v_count = ROW_COUNT;
  RETURN v_count;
END $$;
