-- How a result is published, by signers: check_claim before a slot for an upload is given, accept once the bytes are
-- there, finish once the narinfos are. A crash between them leaves an accepted record that any signer completes.

-- A builder's fence as a signer hears it: the secret decides, not the login.
CREATE FUNCTION ci.holds(r ci.running, s ci.session, p_session bigint, p_secret text, p_attempt bigint) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT true
     AND r.attempt = p_attempt                                                              -- fence: claim_attempt
     AND r.session_id = p_session                                                           -- fence: claim_session_id
     AND s.secret_hash = ci.secret_hash(p_secret)                                           -- fence: claim_secret
$$;

-- What a live claim may produce; no row if the claim is not live.
CREATE FUNCTION ci.check_claim(p_session bigint, p_secret text, p_job bigint, p_attempt bigint)
  RETURNS TABLE (drv_path text, node_id int, phase text, output_names text[], output_paths text[])
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path, s.node_id, r.phase::text, array_agg(o.name ORDER BY o.name), array_agg(o.path ORDER BY o.name)
  FROM ci.running r JOIN ci.session s ON s.id = r.session_id JOIN ci.job j ON j.id = r.job_id JOIN ci.output o ON o.job_id = j.id
  WHERE r.job_id = p_job AND ci.holds(r, s, p_session, p_secret, p_attempt)
    AND NOT r.cancelled                                                                     -- fence: claim_cancelled
  GROUP BY j.drv_path, s.node_id, r.phase
$$;

-- The same of many claims of one session.
CREATE FUNCTION ci.check_claims(p_session bigint, p_secret text, p_jobs bigint[], p_attempts bigint[])
  RETURNS TABLE (job_id bigint, attempt bigint, drv_path text, node_id int, phase text, output_names text[], output_paths text[])
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT u.job_id, u.attempt, c.* FROM unnest(p_jobs, p_attempts) u (job_id, attempt)
  CROSS JOIN LATERAL ci.check_claim(p_session, p_secret, u.job_id, u.attempt) c
$$;

-- What is recorded of paths that jobs want to store, and whether another claim makes them at this moment too.
CREATE FUNCTION ci.recorded(p_paths text[], p_jobs bigint[])
  RETURNS TABLE (path text, nar_hash bytea, file_hash bytea, file_size bigint, contested bool)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT u.path, c.nar_hash, c.file_hash, c.file_size, EXISTS (
    SELECT FROM ci.output o JOIN ci.running r ON r.job_id = o.job_id WHERE o.path = u.path AND o.job_id IS DISTINCT FROM u.job_id)
  FROM unnest(p_paths, p_jobs) u (path, job_id) LEFT JOIN ci.canonical c ON c.path = u.path
$$;

-- What is known of derivations: what was proven before and, where nothing was or where it is asked for, the text.
CREATE FUNCTION ci.texts(p_drv_paths text[], p_always bool) RETURNS TABLE (drv_path text, proof bytea, text bytea)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path, p.proof, CASE WHEN p_always OR p.proof IS NULL THEN a.text END
  FROM unnest(p_drv_paths) u JOIN ci.job j ON j.drv_path = u LEFT JOIN ci.proof p ON p.job_id = j.id LEFT JOIN ci.aterm a ON a.job_id = j.id
$$;

-- Where outputs of derivations are of which only a build shows it.
CREATE FUNCTION ci.realised(p_drv_paths text[]) RETURNS TABLE (drv_path text, output text, path text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path, o.name, o.path FROM unnest(p_drv_paths) u JOIN ci.job j ON j.drv_path = u JOIN ci.output o ON o.job_id = j.id WHERE o.realised
$$;

-- The same of all derivations that made one of these paths.
CREATE FUNCTION ci.realised_at(p_paths text[]) RETURNS TABLE (drv_path text, output text, path text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT r.* FROM ci.realised(ARRAY(SELECT DISTINCT j.drv_path FROM ci.output o JOIN ci.job j ON j.id = o.job_id WHERE o.path = ANY (p_paths) AND o.realised)) r
$$;

CREATE FUNCTION ci.remember_proofs(p_drv_paths text[], p_proofs bytea[]) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.proof SELECT j.id, u.proof FROM unnest(p_drv_paths, p_proofs) u (drv_path, proof) JOIN ci.job j ON j.drv_path = u.drv_path
  ORDER BY j.id ON CONFLICT DO NOTHING
$$;

-- Is this the evaluator of an evaluation that is being written?
CREATE FUNCTION ci.check_evaluation(p_evaluation bigint, p_secret text) RETURNS bool
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT EXISTS (SELECT FROM ci.evaluation e WHERE e.id = p_evaluation
    AND e.secret_hash = ci.secret_hash(p_secret)                                            -- fence: evaluation_secret
    AND e.state = 'evaluating')                                                             -- fence: evaluation_writes
$$;

-- Sources that are in the bucket now. Their paths follow from their contents, so there is nothing to choose: answers
-- what each path is. Without a row: the evaluation is not being written any more.
CREATE FUNCTION ci.accept_sources(p_evaluation bigint, p_secret text, p_paths text[], p_nar_hashes bytea[], p_nar_sizes bigint[],
    p_refs text[], p_file_hashes bytea[], p_file_sizes bigint[])
  RETURNS TABLE (path text, nar_hash bytea, nar_size bigint, refs text[], file_hash bytea, file_size bigint)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  IF NOT ci.check_evaluation(p_evaluation, p_secret) THEN RETURN; END IF;
  IF cardinality(ci.keep(p_paths, p_refs)) > 0 THEN                                         -- fence: source_swept
    PERFORM ci.refuse('HC008', 'a source is being removed from the bucket at this moment: ask again in two minutes');
  END IF;
  INSERT INTO ci.canonical AS c (path, nar_hash, nar_size, refs, file_hash, file_size)
  SELECT u.path, u.nar_hash, u.nar_size, string_to_array(u.refs, ' '), u.file_hash, u.file_size
  FROM unnest(p_paths, p_nar_hashes, p_nar_sizes, p_refs, p_file_hashes, p_file_sizes) u (path, nar_hash, nar_size, refs, file_hash, file_size)
  ORDER BY u.path
  -- Known from a substituter until now; in the bucket from now on.
  ON CONFLICT (path) DO UPDATE SET file_hash = EXCLUDED.file_hash, file_size = EXCLUDED.file_size
  WHERE c.file_hash IS NULL AND c.nar_hash = EXCLUDED.nar_hash;
  RETURN QUERY SELECT c.path, c.nar_hash, c.nar_size, c.refs, c.file_hash, c.file_size FROM ci.canonical c WHERE c.path = ANY (p_paths);
END $$;

-- Takes, or adopts, the canonical record of all outputs of each job, in one transaction and in the order of paths.
-- Outputs name their job by its position. Per job: 'accepted' (this attempt's bytes are the record), 'adopted' (another
-- attempt's are; different ones are a finding), 'stale' (not its claim), 'busy' (its builder, or whoever ends it, has it
-- at this moment: ask again), 'incomplete' (an output is missing or foreign),
-- 'conflict' (some outputs are recorded with other bytes and some not at all: mixing them would splice two builds).
CREATE FUNCTION ci.accept(p_sessions bigint[], p_secrets text[], p_jobs bigint[], p_attempts bigint[],
    p_output_of int[], p_names text[], p_paths text[], p_nar_hashes bytea[], p_nar_sizes bigint[], p_refs text[],
    p_file_hashes bytea[], p_file_sizes bigint[], p_cas text[])
  RETURNS TABLE (job_id bigint, verdict text)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  v_nodes int[]; v_of int[]; v_names text[]; v_paths text[]; v_taken text[]; v_swept text[];
  v_live int[]; v_held int[]; v_whole int[]; v_mixed int[] := '{}'; v_adopted int[] := '{}';   -- positions in p_jobs
  v_known record;
BEGIN
  IF cardinality(p_jobs) > 1024 OR cardinality(p_names) > 16384 OR octet_length(array_to_string(p_refs, '')) > 67108864 THEN
    PERFORM ci.refuse('HC002', 'accept takes at most 1024 jobs with 16384 outputs and 64 MiB of references');
  END IF;
  v_swept := ci.keep(p_paths, p_refs);
  -- Locked rows are not waited for, because a builder may keep its own; accepted ones are accepted again (a signer's answer may have been lost).
  SELECT coalesce(array_agg(x.n), '{}'), array_agg(x.node_id) INTO v_held, v_nodes FROM (
    SELECT u.n::int, r.node_id FROM unnest(p_sessions, p_secrets, p_jobs, p_attempts) WITH ORDINALITY u (session_id, secret, job_id, attempt, n)
    JOIN ci.running r ON r.job_id = u.job_id JOIN ci.session s ON s.id = r.session_id
    WHERE ci.holds(r, s, u.session_id, u.secret, u.attempt)
      AND (cardinality(v_swept) = 0 OR NOT EXISTS (SELECT FROM unnest(p_output_of, p_paths) x (o, path) WHERE x.o = u.n AND x.path = ANY (v_swept)))    -- fence: accept_swept
    FOR UPDATE OF r SKIP LOCKED) x;                                                         -- lock: accept_running
  v_live := v_held;
  IF cardinality(v_held) < cardinality(p_jobs) THEN
    SELECT coalesce(array_agg(u.n), '{}') INTO v_live
    FROM unnest(p_sessions, p_secrets, p_jobs, p_attempts) WITH ORDINALITY u (session_id, secret, job_id, attempt, n)
    JOIN ci.running r ON r.job_id = u.job_id JOIN ci.session s ON s.id = r.session_id WHERE ci.holds(r, s, u.session_id, u.secret, u.attempt);
  END IF;

  -- Every output of the derivation and no other, where it says. As a whole at first, which is the usual case.
  SELECT array_agg(u.n::int), array_agg(e.name), array_agg(e.path) INTO v_of, v_names, v_paths
  FROM unnest(p_jobs) WITH ORDINALITY u (job_id, n) JOIN ci.output e ON e.job_id = u.job_id;
  v_whole := v_held;
  IF (v_of = p_output_of AND v_names = p_names AND v_paths = p_paths) IS NOT TRUE THEN
    SELECT coalesce(array_agg(n), '{}') INTO v_whole FROM unnest(v_held) n WHERE NOT EXISTS (
      SELECT FROM (SELECT name, path FROM unnest(p_output_of, p_names, p_paths) x (o, name, path) WHERE x.o = n) g
      FULL JOIN (SELECT name, path FROM unnest(v_of, v_names, v_paths) y (o, name, path) WHERE y.o = n) e USING (name)
      WHERE g.path IS NULL OR e.name IS NULL OR octet_length(g.path) > 300
         OR g.path <> e.path);                                                              -- fence: output_path
    -- A path that is not known before the build is what it came out as.
    UPDATE ci.output e SET path = x.path, realised = true FROM unnest(p_output_of, p_names, p_paths) x (o, name, path)
    WHERE e.job_id = p_jobs[x.o] AND e.name = x.name AND e.path IS NULL AND x.o = ANY (v_whole);
  END IF;

  WITH put AS (
    INSERT INTO ci.canonical (path, nar_hash, nar_size, refs, file_hash, file_size, ca, job_id, attempt, node_id)
    SELECT x.path, x.nar_hash, x.nar_size, string_to_array(x.refs, ' '), x.file_hash, x.file_size, x.ca, p_jobs[x.o], p_attempts[x.o],
           v_nodes[array_position(v_held, x.o)]
    FROM unnest(p_output_of, p_paths, p_nar_hashes, p_nar_sizes, p_refs, p_file_hashes, p_file_sizes, p_cas) x (o, path, nar_hash, nar_size, refs, file_hash, file_size, ca)
    WHERE x.o = ANY (v_whole) ORDER BY x.path
    ON CONFLICT (path) DO NOTHING RETURNING path)
  SELECT coalesce(array_agg(path), '{}') INTO v_taken FROM put;

  IF cardinality(v_taken) < cardinality(p_paths) THEN
    INSERT INTO ci.finding (path, canonical_hash, seen_hash, job_id, attempt, node_id)
    SELECT c.path, c.nar_hash, x.nar_hash, p_jobs[x.o], p_attempts[x.o], v_nodes[array_position(v_held, x.o)]
    FROM unnest(p_output_of, p_paths, p_nar_hashes) x (o, path, nar_hash) JOIN ci.canonical c ON c.path = x.path
    WHERE x.o = ANY (v_whole) AND c.nar_hash <> x.nar_hash ON CONFLICT DO NOTHING;
    SELECT coalesce(array_agg(o) FILTER (WHERE taken AND differs), '{}'), coalesce(array_agg(o) FILTER (WHERE NOT own), '{}') INTO v_mixed, v_adopted FROM (
      SELECT x.o, bool_or(x.path = ANY (v_taken)) AS taken, bool_or(c.nar_hash <> x.nar_hash) AS differs, bool_and(c.attempt IS NOT DISTINCT FROM p_attempts[x.o]) AS own
      FROM unnest(p_output_of, p_paths, p_nar_hashes) x (o, path, nar_hash) JOIN ci.canonical c ON c.path = x.path WHERE x.o = ANY (v_whole) GROUP BY x.o) m;
    DELETE FROM ci.canonical c USING unnest(p_output_of, p_paths) x (o, path)
    WHERE c.path = x.path AND x.o = ANY (v_mixed)
      AND c.path = ANY (v_taken);                                                           -- fence: no_splice
    -- Known from a substituter until now; in the bucket from now on. One by one, so that rows are locked in the order of paths.
    FOR v_known IN
      SELECT x.path, x.file_hash, x.file_size FROM unnest(p_output_of, p_paths, p_nar_hashes, p_file_hashes, p_file_sizes) x (o, path, nar_hash, file_hash, file_size)
      JOIN ci.canonical c ON c.path = x.path AND c.nar_hash = x.nar_hash AND c.file_hash IS NULL
      WHERE x.o = ANY (v_whole) AND x.o <> ALL (v_mixed) ORDER BY x.path
    LOOP
      UPDATE ci.canonical SET file_hash = v_known.file_hash, file_size = v_known.file_size WHERE path = v_known.path AND file_hash IS NULL;
    END LOOP;
  END IF;

  -- By position: one call may name a job twice, by an attempt that is over and by the one that runs.
  UPDATE ci.running r SET phase = 'accepted', uploaded_at = coalesce(r.uploaded_at, ci.clock())
  WHERE r.job_id = ANY (p_jobs) AND r.phase <> 'accepted'
    AND r.job_id = ANY (ARRAY(SELECT p_jobs[n] FROM unnest(v_whole) n))                     -- fence: accept_whole
    AND r.job_id <> ALL (ARRAY(SELECT p_jobs[n] FROM unnest(v_mixed) n));                   -- fence: accept_mixed
  FOR n IN 1 .. cardinality(p_jobs) LOOP
    job_id := p_jobs[n];
    verdict := CASE WHEN n <> ALL (v_live) THEN 'stale' WHEN n <> ALL (v_held) THEN 'busy' WHEN n <> ALL (v_whole) THEN 'incomplete'
                    WHEN n = ANY (v_mixed) THEN 'conflict' WHEN n = ANY (v_adopted) THEN 'adopted' ELSE 'accepted' END;
    RETURN NEXT;
  END LOOP;
END $$;

-- Accepted records that nobody has finished: any signer takes them up. Older first; or those of some jobs, at once.
CREATE FUNCTION ci.unpublished(p_older_than interval DEFAULT '30 seconds', p_jobs bigint[] DEFAULT NULL)
  RETURNS TABLE (job_id bigint, attempt bigint, drv_path text, path text, output text, nar_hash bytea, nar_size bigint,
                 refs text[], file_hash bytea, file_size bigint, ca text, made_by bigint, realised bool)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT r.job_id, r.attempt, j.drv_path, o.path, o.name, c.nar_hash, c.nar_size, c.refs, c.file_hash, c.file_size, c.ca, c.attempt, o.realised
  FROM ci.running r JOIN ci.job j ON j.id = r.job_id JOIN ci.output o ON o.job_id = r.job_id JOIN ci.canonical c ON c.path = o.path
  WHERE r.phase = 'accepted' AND CASE WHEN p_jobs IS NULL THEN r.uploaded_at <= ci.clock() - p_older_than ELSE r.job_id = ANY (p_jobs) END
  ORDER BY r.attempt, o.name LIMIT 16384
$$;

-- Published: the job has succeeded, and what waits for it is looked at. Answers the jobs that this call finished, and those
-- that it could not because their builder, or whoever ends them, has them at this moment: ask again.
CREATE FUNCTION ci.finish(p_jobs bigint[], p_attempts bigint[]) RETURNS TABLE (job_id bigint, busy bool)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE v_jobs bigint[];
BEGIN
  SELECT coalesce(array_agg(x.job_id), '{}') INTO v_jobs FROM (
    SELECT r.job_id FROM unnest(p_jobs, p_attempts) u (job_id, attempt) JOIN ci.running r ON r.job_id = u.job_id
    WHERE r.attempt = u.attempt                                                             -- fence: finish_attempt
      AND r.phase = 'accepted'                                                              -- fence: finish_accepted
    FOR UPDATE OF r SKIP LOCKED) x;                                                         -- lock: finish_running
  IF cardinality(v_jobs) < cardinality(p_jobs) THEN
    RETURN QUERY SELECT r.job_id, true FROM unnest(p_jobs, p_attempts) u (job_id, attempt) JOIN ci.running r ON r.job_id = u.job_id
    WHERE r.attempt = u.attempt AND r.phase = 'accepted' AND r.job_id <> ALL (v_jobs);
  END IF;
  IF cardinality(v_jobs) = 0 THEN RETURN; END IF;
  PERFORM ci.end_attempts(v_jobs, 'succeeded', NULL, true);
  WITH ended AS (UPDATE ci.job SET state = 'succeeded', ended_at = ci.clock(), failure = NULL, error = NULL WHERE id = ANY (v_jobs) RETURNING id)
  INSERT INTO ci.event (kind, subject) SELECT 'd', id FROM ended;                           -- event: finished_tells_dependents
  RETURN QUERY SELECT j, false FROM unnest(v_jobs) j;
END $$;

-- An accepted result that no signer can publish before a person has done something, which the sentence says. What it would have made
-- of its paths is forgotten, so that a later build is not measured by it. False: it is not accepted any more, or its builder, or
-- whoever ends it, has it at this moment: whoever finds it next gives it up.
CREATE FUNCTION ci.give_up(p_job bigint, p_attempt bigint, p_error text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_running ci.running; v_kind ci.failure_kind; v_gone text[];
BEGIN
  SELECT * INTO v_running FROM ci.running r
  WHERE r.job_id = p_job
    AND r.attempt = p_attempt                                                               -- fence: give_up_attempt
    AND r.phase = 'accepted'                                                                -- fence: give_up_accepted
  FOR UPDATE SKIP LOCKED;                                                                   -- lock: give_up_running
  IF NOT FOUND THEN RETURN false; END IF;
  WITH gone AS (DELETE FROM ci.canonical c WHERE c.path = ANY (ARRAY(SELECT o.path FROM ci.output o WHERE o.job_id = p_job))
                  AND c.attempt = p_attempt                                                 -- fence: give_up_own
                RETURNING c.path)
  SELECT array_agg(path) INTO v_gone FROM gone;
  -- Another that was accepted with the same record has none any more, as if it had not been shown.
  UPDATE ci.running r SET phase = 'uploading' WHERE r.phase = 'accepted' AND r.job_id <> p_job
    AND r.job_id IN (SELECT o.job_id FROM ci.output o WHERE o.path = ANY (v_gone));
  UPDATE ci.output SET path = NULL, realised = false WHERE job_id = p_job AND realised;
  SELECT * INTO v_kind FROM ci.failure_kind WHERE kind = 'not_published';
  PERFORM ci.fail_attempts(ARRAY[p_job], v_running.node_id, v_kind, left(p_error, 2000));
  RETURN true;
END $$;

CREATE FUNCTION ci.missing_reports() RETURNS SETOF ci.missing
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT * FROM ci.missing ORDER BY reported_at LIMIT 1000 $$;

-- A signer has looked. Gone: its producers build again, or, for what no derivation makes, the waiting jobs fail with a
-- sentence. There after all: they go on elsewhere if they can, for it may be the node that does not get what everybody else does;
-- that is an interruption, of which ten are an end.
CREATE FUNCTION ci.settle_missing(p_path text, p_gone bool) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_waiting bigint[]; v_count int := 0; v_missed record;
BEGIN
  PERFORM FROM ci.resolver FOR UPDATE;                                                      -- lock: settle_resolver
  WITH told AS (DELETE FROM ci.missing WHERE path = p_path RETURNING job_id) SELECT array_agg(job_id) INTO v_waiting FROM told;
  IF p_gone THEN
    v_count := ci.unpublish(ARRAY[p_path]);
    IF v_count = 0 AND NOT EXISTS (SELECT FROM ci.output o JOIN ci.aterm a ON a.job_id = o.job_id WHERE o.path = p_path) THEN
      PERFORM ci.retire(v_waiting, 'failed', 'source_lost', format('%s is gone from the cache and no derivation of ours makes it: evaluate again', p_path));
    END IF;
  ELSE
    FOR v_missed IN
      UPDATE ci.job j SET interruptions = j.interruptions + 1, avoid = n.id
      FROM unnest(v_waiting) m CROSS JOIN LATERAL (
        SELECT d.id, d.name FROM ci.attempt a JOIN ci.session s ON s.id = a.session_id JOIN ci.node d ON d.id = s.node_id
        WHERE a.job_id = m AND a.outcome = 'input_missing' ORDER BY a.id DESC LIMIT 1) n
      WHERE j.id = m RETURNING j.id, j.interruptions, n.name
    LOOP
      IF v_missed.interruptions >= 10 THEN
        PERFORM ci.retire(ARRAY[v_missed.id], 'failed', 'interrupted', format('interrupted 10 times without an end, the last time because node %s '
          'could not fetch its input %s, which is in the cache: look on that node whether its Nix trusts the key of the cache '
          '(trusted-public-keys) and reaches it', v_missed.name, p_path));
      END IF;
    END LOOP;
  END IF;
  INSERT INTO ci.event (kind, subject) SELECT 'e', unnest(v_waiting);                       -- event: settled_is_judged
  RETURN v_count;
END $$;

-- Forgets what paths are and reopens whoever makes them, with all their outputs: half a derivation is never kept.
CREATE FUNCTION ci.unpublish(p_paths text[]) RETURNS int LANGUAGE plpgsql AS $$
DECLARE v_makers bigint[];
BEGIN
  SELECT array_agg(id) INTO v_makers FROM (
    SELECT j.id FROM ci.job j WHERE j.id IN (SELECT o.job_id FROM ci.output o WHERE o.path = ANY (p_paths))
      AND j.state IN ('succeeded', 'cached') AND EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = j.id) ORDER BY j.id FOR NO KEY UPDATE) x;    -- lock: unpublish_jobs
  IF v_makers IS NULL THEN RETURN 0; END IF;
  -- One list, or all of the table would be read under the caller's locks.
  DELETE FROM ci.canonical c WHERE c.path = ANY (p_paths || ARRAY(SELECT o.path FROM ci.output o WHERE o.job_id = ANY (v_makers)));
  -- Wanted by nobody: it stays as it is, and is built when somebody wants it.
  PERFORM ci.reopen(ARRAY(SELECT m FROM unnest(v_makers) m WHERE ci.wanted(m)));
  UPDATE ci.job SET state = 'cancelled', error = 'its outputs were removed from the cache' WHERE id = ANY (v_makers) AND NOT ci.wanted(id);
  RETURN cardinality(v_makers);
END $$;

-- What forgetting would take, with all that was made together: to be removed from the bucket before it is forgotten here. By node every record is looked at once,
-- without a lock that anybody waits for: that is rare, and an index would cost every result something.
CREATE FUNCTION ci.to_forget(p_paths text[], p_node int DEFAULT NULL) RETURNS SETOF text
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH RECURSIVE named (path) AS (
    SELECT c.path FROM ci.canonical c WHERE c.path = ANY (p_paths)
    UNION SELECT c.path FROM ci.canonical c WHERE p_node IS NOT NULL AND c.node_id = p_node),
  going (path) AS (
    SELECT path FROM named
    -- The other outputs of whoever makes it, and so on where several derivations make one path.
    UNION SELECT c.path FROM going g JOIN ci.output o ON o.path = g.path JOIN ci.output s ON s.job_id = o.job_id JOIN ci.canonical c ON c.path = s.path)
  SELECT path FROM going
$$;

-- Nodes by name, or by pool/name.
CREATE FUNCTION ci.nodes_named(p_name text) RETURNS SETOF int
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT n.id FROM ci.node n JOIN ci.pool p ON p.id = n.pool_id WHERE p_name IN (n.name, p.name || '/' || n.name)
$$;

-- What the bucket should hold, a page at a time, by path: for signing again, and for checking.
CREATE FUNCTION ci.published(p_after text, p_rows int)
  RETURNS TABLE (path text, nar_hash bytea, nar_size bigint, refs text[], file_hash bytea, file_size bigint, ca text, drv_path text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT c.path, c.nar_hash, c.nar_size, c.refs, c.file_hash, c.file_size, c.ca, j.drv_path
  FROM ci.canonical c LEFT JOIN ci.job j ON j.id = c.job_id
  WHERE c.path > p_after AND c.file_hash IS NOT NULL ORDER BY c.path LIMIT p_rows
$$;

-- `harmonia-ci cache forget`: these paths, or all that a node built. The caller has removed the objects of what ci.to_forget answered,
-- and names that: what was recorded since is not forgotten.
CREATE FUNCTION ci.forget(p_paths text[], p_node int DEFAULT NULL) RETURNS SETOF text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_paths text[];
BEGIN
  v_paths := ARRAY(SELECT c.path FROM ci.canonical c WHERE c.path = ANY (p_paths)
                   UNION SELECT c.path FROM ci.canonical c WHERE p_node IS NOT NULL AND c.node_id = p_node);
  -- Accepted but not yet published: as if it had not been shown. Its builder shows it again, or its lease ends.
  WITH back AS (UPDATE ci.running r SET phase = 'uploading' WHERE r.phase = 'accepted'
                  AND r.job_id IN (SELECT o.job_id FROM ci.output o WHERE o.path = ANY (v_paths)) RETURNING r.job_id)
  INSERT INTO ci.event (kind, subject) SELECT 'u', job_id FROM back;                        -- event: forgotten_is_looked_at
  UPDATE ci.output o SET path = NULL, realised = false FROM ci.running r
  WHERE o.job_id = r.job_id AND o.realised AND r.job_id IN (SELECT p.job_id FROM ci.output p WHERE p.path = ANY (v_paths));
  PERFORM ci.unpublish(v_paths);
  DELETE FROM ci.canonical WHERE path = ANY (v_paths);
  RETURN QUERY SELECT unnest(v_paths);
END $$;
