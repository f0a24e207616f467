-- How a result is published, by signers: check_claim before a slot for an upload is given, accept once the bytes are
-- there, finish once the narinfos are. A crash between them leaves an accepted record that any signer completes.

-- A builder's fence as a signer hears it: the secret decides, not the login.
CREATE FUNCTION ci.claim_of(p_session bigint, p_secret text, p_job bigint, p_attempt bigint) RETURNS SETOF ci.running LANGUAGE sql STABLE AS $$
  SELECT r.* FROM ci.running r JOIN ci.session s ON s.id = r.session_id
  WHERE r.job_id = p_job
    AND r.attempt = p_attempt                                                               -- fence: claim_attempt
    AND r.session_id = p_session                                                            -- fence: claim_session_id
    AND s.secret_hash = ci.secret_hash(p_secret)                                            -- fence: claim_secret
$$;

-- What a live claim may produce; no row if the claim is not live.
CREATE FUNCTION ci.check_claim(p_session bigint, p_secret text, p_job bigint, p_attempt bigint)
  RETURNS TABLE (drv_path text, node_id int, phase text, output_names text[], output_paths text[])
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path, s.node_id, r.phase::text, array_agg(o.name ORDER BY o.name), array_agg(o.path ORDER BY o.name)
  FROM ci.claim_of(p_session, p_secret, p_job, p_attempt) r JOIN ci.session s ON s.id = r.session_id
  JOIN ci.job j ON j.id = r.job_id JOIN ci.output o ON o.job_id = j.id
  WHERE NOT r.cancelled                                                                     -- fence: claim_cancelled
  GROUP BY j.drv_path, s.node_id, r.phase
$$;

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
DECLARE v_live bool[]; v_held bool[]; v_nodes int[]; v_whole bool[]; v_taken text[]; v_mixed bool[];
BEGIN
  IF cardinality(p_jobs) > 1024 OR cardinality(p_names) > 16384
     OR EXISTS (SELECT FROM unnest(p_paths, p_refs) u (p, r) WHERE octet_length(p) > 300 OR octet_length(r) > 4194304) THEN
    PERFORM ci.refuse('HC002', 'accept takes at most 1024 jobs with 16384 outputs, paths of 300 bytes and references of 4 MiB');
  END IF;
  -- Locked rows are not waited for, because a builder may keep its own; accepted ones are accepted again (a signer's answer may have been lost).
  SELECT array_agg(r.job_id IS NOT NULL ORDER BY u.n), array_agg(r.node_id ORDER BY u.n) INTO v_live, v_nodes
  FROM unnest(p_sessions, p_secrets, p_jobs, p_attempts) WITH ORDINALITY u (session_id, secret, job_id, attempt, n)
  LEFT JOIN LATERAL (SELECT c.job_id, s.node_id FROM ci.claim_of(u.session_id, u.secret, u.job_id, u.attempt) c
                     JOIN ci.session s ON s.id = c.session_id) r ON true;
  SELECT array_agg(v_live[u.n] AND r.job_id IS NOT NULL ORDER BY u.n) INTO v_held
  FROM unnest(p_jobs) WITH ORDINALITY u (job_id, n) LEFT JOIN (
    SELECT q.job_id, q.attempt FROM ci.running q WHERE q.job_id = ANY (p_jobs)
    ORDER BY q.job_id FOR UPDATE SKIP LOCKED) r ON r.job_id = u.job_id AND r.attempt = p_attempts[u.n];   -- lock: accept_running
  -- Every output of the derivation and no other; a path that is not known before the build is what it came out as.
  SELECT array_agg(v_held[u.n] AND NOT EXISTS (
           SELECT FROM (SELECT name, path FROM unnest(p_output_of, p_names, p_paths) x (o, name, path) WHERE x.o = u.n) g
           FULL JOIN (SELECT o.name, o.path FROM ci.output o WHERE o.job_id = u.job_id) e USING (name)
           WHERE g.path IS NULL OR e.name IS NULL
              OR g.path <> e.path)                                                          -- fence: output_path
         ORDER BY u.n) INTO v_whole
  FROM unnest(p_jobs) WITH ORDINALITY u (job_id, n);

  WITH put AS (
    INSERT INTO ci.canonical (path, nar_hash, nar_size, refs, file_hash, file_size, ca, job_id, attempt, node_id)
    SELECT x.path, x.nar_hash, x.nar_size, string_to_array(x.refs, ' '), x.file_hash, x.file_size, x.ca, p_jobs[x.o], p_attempts[x.o], v_nodes[x.o]
    FROM unnest(p_output_of, p_paths, p_nar_hashes, p_nar_sizes, p_refs, p_file_hashes, p_file_sizes, p_cas) x (o, path, nar_hash, nar_size, refs, file_hash, file_size, ca)
    WHERE v_whole[x.o] ORDER BY x.path
    ON CONFLICT (path) DO NOTHING RETURNING path)
  SELECT array_agg(path) INTO v_taken FROM put;

  IF cardinality(v_taken) IS DISTINCT FROM cardinality(p_paths) THEN
    INSERT INTO ci.finding (path, canonical_hash, seen_hash, job_id, attempt, node_id)
    SELECT c.path, c.nar_hash, x.nar_hash, p_jobs[x.o], p_attempts[x.o], v_nodes[x.o]
    FROM unnest(p_output_of, p_paths, p_nar_hashes) x (o, path, nar_hash) JOIN ci.canonical c ON c.path = x.path
    WHERE v_whole[x.o] AND c.nar_hash <> x.nar_hash ON CONFLICT DO NOTHING;
    SELECT array_agg(coalesce(m.mixed, false) ORDER BY u.n) INTO v_mixed
    FROM generate_subscripts(p_jobs, 1) u (n) LEFT JOIN (
      SELECT x.o, bool_or(x.path = ANY (v_taken)) AND bool_or(c.nar_hash <> x.nar_hash) AS mixed
      FROM unnest(p_output_of, p_paths, p_nar_hashes) x (o, path, nar_hash) JOIN ci.canonical c ON c.path = x.path GROUP BY x.o) m ON m.o = u.n;
    DELETE FROM ci.canonical c USING unnest(p_output_of, p_paths) x (o, path)
    WHERE c.path = x.path AND v_mixed[x.o]
      AND c.path = ANY (v_taken);                                                           -- fence: no_splice
  END IF;

  UPDATE ci.output e SET path = x.path FROM unnest(p_output_of, p_names, p_paths) x (o, name, path)
  WHERE e.job_id = p_jobs[x.o] AND e.name = x.name AND e.path IS NULL AND v_whole[x.o];
  UPDATE ci.running r SET phase = 'accepted', uploaded_at = coalesce(r.uploaded_at, ci.clock())
  FROM unnest(p_jobs) WITH ORDINALITY u (job_id, n)
  WHERE r.job_id = u.job_id AND v_whole[u.n] AND NOT coalesce(v_mixed[u.n], false) AND r.phase <> 'accepted';
  RETURN QUERY SELECT u.job_id, CASE
      WHEN NOT v_live[u.n] THEN 'stale'
      WHEN NOT v_held[u.n] THEN 'busy'
      WHEN NOT v_whole[u.n] THEN 'incomplete'
      WHEN coalesce(v_mixed[u.n], false) THEN 'conflict'
      WHEN EXISTS (SELECT FROM unnest(p_output_of, p_paths) x (o, path) JOIN ci.canonical c ON c.path = x.path
                   WHERE x.o = u.n AND c.attempt IS DISTINCT FROM p_attempts[u.n]) THEN 'adopted'
      ELSE 'accepted' END
    FROM unnest(p_jobs) WITH ORDINALITY u (job_id, n);
END $$;

-- Accepted records that nobody has finished: any signer takes them up. Older first.
CREATE FUNCTION ci.unpublished(p_older_than interval DEFAULT '30 seconds')
  RETURNS TABLE (job_id bigint, attempt bigint, drv_path text, path text, output text, nar_hash bytea, nar_size bigint,
                 refs text[], file_hash bytea, file_size bigint, ca text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT r.job_id, r.attempt, j.drv_path, o.path, o.name, c.nar_hash, c.nar_size, c.refs, c.file_hash, c.file_size, c.ca
  FROM ci.running r JOIN ci.job j ON j.id = r.job_id JOIN ci.output o ON o.job_id = r.job_id JOIN ci.canonical c ON c.path = o.path
  WHERE r.phase = 'accepted' AND r.uploaded_at <= ci.clock() - p_older_than ORDER BY r.attempt LIMIT 1000
$$;

-- Published: the job has succeeded, and what waits for it is looked at. Answers the jobs that this call finished.
CREATE FUNCTION ci.finish(p_jobs bigint[], p_attempts bigint[]) RETURNS SETOF bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_jobs bigint[]; v_sessions bigint[];
BEGIN
  SELECT array_agg(x.job_id), array_agg(DISTINCT x.session_id) INTO v_jobs, v_sessions FROM (
    SELECT r.job_id, r.session_id FROM unnest(p_jobs, p_attempts) u (job_id, attempt) JOIN ci.running r ON r.job_id = u.job_id
    WHERE r.attempt = u.attempt                                                             -- fence: finish_attempt
      AND r.phase = 'accepted'                                                              -- fence: finish_accepted
    ORDER BY r.job_id FOR UPDATE OF r SKIP LOCKED) x;                                       -- lock: finish_running
  IF v_jobs IS NULL THEN RETURN; END IF;
  PERFORM ci.end_attempts(v_jobs, 'succeeded', NULL, true);
  UPDATE ci.job SET state = 'succeeded', ended_at = ci.clock(), failure = NULL, error = NULL WHERE id = ANY (v_jobs);
  INSERT INTO ci.event (kind, subject) SELECT 'd', unnest(v_jobs);                          -- event: finished_tells_dependents
  IF EXISTS (SELECT FROM ci.session s WHERE s.id = ANY (v_sessions) AND s.streak > 0) THEN
    UPDATE ci.session SET streak = 0 WHERE id = ANY (ARRAY(
      SELECT s.id FROM ci.session s WHERE s.id = ANY (v_sessions) AND s.streak > 0 FOR UPDATE SKIP LOCKED));
  END IF;
  RETURN QUERY SELECT unnest(v_jobs);
END $$;

CREATE FUNCTION ci.missing_reports() RETURNS SETOF ci.missing
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT * FROM ci.missing ORDER BY reported_at LIMIT 1000 $$;

-- A signer has looked. Gone: its producers build again, or, for what no derivation makes, the waiting jobs fail with a
-- sentence. There after all: they simply go on.
CREATE FUNCTION ci.settle_missing(p_path text, p_gone bool) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_waiting bigint[]; v_count int := 0;
BEGIN
  WITH told AS (DELETE FROM ci.missing WHERE path = p_path RETURNING job_id) SELECT array_agg(job_id) INTO v_waiting FROM told;
  IF p_gone THEN
    v_count := ci.unpublish(ARRAY[p_path]);
    IF v_count = 0 AND NOT EXISTS (SELECT FROM ci.output o JOIN ci.aterm a ON a.job_id = o.job_id WHERE o.path = p_path) THEN
      PERFORM ci.retire(v_waiting, 'failed', 'source_lost', format('%s is gone from the cache and no derivation of ours makes it: evaluate again', p_path));
    END IF;
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
      AND j.state IN ('succeeded', 'cached') AND EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = j.id) ORDER BY j.id FOR NO KEY UPDATE) x;
  IF v_makers IS NULL THEN RETURN 0; END IF;
  DELETE FROM ci.canonical c WHERE c.path = ANY (p_paths) OR c.path IN (SELECT o.path FROM ci.output o WHERE o.job_id = ANY (v_makers));
  -- Wanted by nobody: it stays as it is, and is built when somebody wants it.
  PERFORM ci.reopen(ARRAY(SELECT m FROM unnest(v_makers) m WHERE ci.wanted(m)));
  UPDATE ci.job SET state = 'cancelled', error = 'its outputs were removed from the cache' WHERE id = ANY (v_makers) AND NOT ci.wanted(id);
  RETURN cardinality(v_makers);
END $$;

-- `harmonia-ci cache forget`: these paths, or all that a node built. The caller removes the objects.
CREATE FUNCTION ci.forget(p_paths text[], p_node int DEFAULT NULL) RETURNS SETOF text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_paths text[];
BEGIN
  v_paths := ARRAY(SELECT path FROM ci.canonical WHERE path = ANY (p_paths) OR node_id = p_node);
  -- Accepted but not yet published: as if it had not been shown. Its builder shows it again, or its lease ends.
  UPDATE ci.running r SET phase = 'uploading' WHERE r.phase = 'accepted'
    AND r.job_id IN (SELECT o.job_id FROM ci.output o WHERE o.path = ANY (v_paths));
  PERFORM ci.unpublish(v_paths);
  DELETE FROM ci.canonical WHERE path = ANY (v_paths);
  RETURN QUERY SELECT unnest(v_paths);
END $$;
