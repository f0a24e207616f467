-- Where a project's code is, which commit each of its branches was last seen at, and what a push does: one evaluation of a
-- commit on a branch, the newest instead of those before it.

-- What a Project's spec, or people, say. `credential` is the name of a secret that evaluators have, never the secret itself.
CREATE TABLE ci.project_source (
  project_id    int PRIMARY KEY REFERENCES ci.project ON DELETE CASCADE,
  kind          text NOT NULL CHECK (kind IN ('github', 'gitea', 'git')),
  url           text NOT NULL CHECK (octet_length(url) BETWEEN 1 AND 2048),       -- what git clones from
  instance      text CHECK (octet_length(instance) <= 1024),
  owner         text CHECK (octet_length(owner) <= 200),
  repo          text CHECK (octet_length(repo) <= 200),
  branch        text CHECK (octet_length(branch) BETWEEN 1 AND 1024),             -- NULL: the repository's default
  attrs         text[] NOT NULL DEFAULT '{}' CHECK (octet_length(array_to_string(attrs, ' ')) <= 65536),
  poll_interval interval NOT NULL DEFAULT '5 minutes' CHECK (poll_interval >= '1 second'),
  pull_requests text NOT NULL DEFAULT 'Collaborators' CHECK (pull_requests IN ('Collaborators', 'All', 'None')),
  credential    text CHECK (octet_length(credential) BETWEEN 1 AND 253),
  poll_at       timestamptz NOT NULL DEFAULT ci.clock(),                          -- when somebody looks for new commits next
  poll_error    text CHECK (octet_length(poll_error) <= 16384)                    -- why the last look saw nothing
);
CREATE INDEX project_source_poll ON ci.project_source (poll_at);
CREATE INDEX project_source_repo ON ci.project_source (kind, lower(owner), lower(repo));

-- The commit at which a branch was seen last, so that pushes that nobody told us of are found by comparing.
CREATE TABLE ci.head (
  project_id int NOT NULL REFERENCES ci.project ON DELETE CASCADE,
  branch     text NOT NULL CHECK (octet_length(branch) BETWEEN 1 AND 1024),
  commit_id  text NOT NULL CHECK (octet_length(commit_id) BETWEEN 1 AND 200),
  seen_at    timestamptz NOT NULL,
  PRIMARY KEY (project_id, branch)
);

-- pushed: not asked for by a person. superseded_by: the evaluation of a newer push that ended it, or itself where it ended because
-- its branch, its pull request or its project did. tree: what was evaluated, and how. retention: what its source asks for, if
-- that is shorter than the project's. repeats: what was pushed, and a person wants once more.
ALTER TABLE ci.evaluation ADD COLUMN pushed bool NOT NULL DEFAULT false, ADD COLUMN pull_request int,
  ADD COLUMN superseded_by bigint, ADD COLUMN tree text CHECK (octet_length(tree) <= 200),
  ADD COLUMN retention interval, ADD COLUMN repeats bigint;
-- One evaluation of a commit on a branch. A branch that comes back to a commit whose evaluation was ended by us, and not by a
-- person, needs another; so does a commit that could not be evaluated, for the cause may have passed.
CREATE UNIQUE INDEX evaluation_pushed ON ci.evaluation (project_id, branch, commit_id, coalesce(pull_request, 0))
  WHERE pushed AND superseded_by IS NULL AND state <> 'aborted';
CREATE INDEX evaluation_tree ON ci.evaluation (project_id, tree) WHERE tree IS NOT NULL;
CREATE INDEX evaluation_commit ON ci.evaluation (project_id, commit_id) WHERE superseded_by IS NULL;

-- Every candidate of a merge queue is judged on its own: its successor does not stand for it.
CREATE FUNCTION ci.is_merge_queue(p_branch text) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT p_branch LIKE 'gh-readonly-queue/%' OR p_branch IN ('staging', 'trying')
$$;

-- Ends what was pushed, for a reason that may pass: whoever pushes the same commit again has it evaluated again. If it spoke for its
-- commit, the newest one does from now on that was not ended like this: another branch may be at the same commit.
CREATE FUNCTION ci.supersede(p_evaluation bigint, p_by bigint, p_reason text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.evaluation SET superseded_by = p_by WHERE id = p_evaluation;
  UPDATE ci.report r SET evaluation_id = o.id, next_at = ci.clock(), asked = r.asked + 1
  FROM (SELECT e.id FROM ci.evaluation s JOIN ci.evaluation e ON e.project_id = s.project_id AND e.commit_id = s.commit_id
        WHERE s.id = p_evaluation AND e.branch IS NOT NULL
          AND e.superseded_by IS NULL                                                       -- fence: speaks_instead
        ORDER BY e.id DESC LIMIT 1) o
  WHERE r.evaluation_id = p_evaluation;
  RETURN ci.end_evaluation(p_evaluation, 'cancelled', p_reason);
END $$;

-- A branch, or a pull request, is at a commit now. Answers the evaluation of that: the one that is there, or a new one, which ends
-- older unfinished ones of the same branch. Nothing from outside ends what is trusted. NULL: the pull request has another head by now.
CREATE FUNCTION ci.push(p_project text, p_source text, p_branch text, p_commit text, p_tier smallint, p_attrs text[],
    p_pull_request int DEFAULT NULL) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_project int; v_id bigint; v_older bigint;
BEGIN
  IF p_branch IS NULL OR p_commit IS NULL THEN
    PERFORM ci.refuse('HC002', 'a push needs a branch and a commit');
  END IF;
  -- Pushes of one project come one after the other: each sees what the one before it has made.
  SELECT id INTO v_project FROM ci.project WHERE name = p_project AND deleted_at IS NULL FOR NO KEY UPDATE;    -- lock: push_order
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC007', format('there is no project %s', p_project));
  END IF;
  IF p_tier = 1 AND EXISTS (SELECT FROM ci.pull_request r WHERE r.project_id = v_project AND r.number = p_pull_request
                            AND r.commit_id <> p_commit) THEN                               -- fence: proposed_head
    RETURN NULL;
  END IF;
  IF p_tier = 0 AND p_pull_request IS NULL THEN                                             -- fence: head_trusted
    INSERT INTO ci.head AS h (project_id, branch, commit_id, seen_at) VALUES (v_project, p_branch, p_commit, ci.clock())
    ON CONFLICT (project_id, branch) DO UPDATE SET commit_id = EXCLUDED.commit_id, seen_at = EXCLUDED.seen_at;
  END IF;
  SELECT id INTO v_id FROM ci.evaluation WHERE project_id = v_project AND branch = p_branch AND commit_id = p_commit
    AND coalesce(pull_request, 0) = coalesce(p_pull_request, 0) AND pushed AND superseded_by IS NULL
    AND state <> 'aborted';                                                                 -- fence: push_aborted
  IF NOT FOUND THEN
    INSERT INTO ci.evaluation (project_id, source, branch, commit_id, tier, attrs, pull_request, pushed)
    VALUES (v_project, p_source, p_branch, p_commit, p_tier, coalesce(p_attrs, '{}'), p_pull_request, true) RETURNING id INTO v_id;
  END IF;
  FOR v_older IN SELECT e.id FROM ci.evaluation e
    WHERE e.project_id = v_project AND e.branch = p_branch AND e.id <> v_id AND e.pushed
      AND coalesce(e.pull_request, 0) = coalesce(p_pull_request, 0)                         -- fence: supersede_pull_request
      AND e.tier >= p_tier                                                                  -- fence: supersede_tier
      AND NOT ci.is_merge_queue(p_branch)                                                   -- fence: merge_queue
      -- What is older than the last twenty was ended by one of them, or had nothing left to end: all that it wants would be read for that.
      AND (e.state IN ('queued', 'evaluating') OR e.state = 'complete' AND e.id IN (
             SELECT n.id FROM ci.evaluation n WHERE n.project_id = v_project AND n.branch = p_branch ORDER BY n.id DESC LIMIT 20)
           AND EXISTS (SELECT FROM ci.want w JOIN ci.job j ON j.id = w.job_id WHERE w.evaluation_id = e.id AND j.state = 'open'))
    ORDER BY e.id LOOP
    PERFORM ci.supersede(v_older, v_id, format('a newer push to %s stands for it', p_branch));
  END LOOP;
  RETURN v_id;
END $$;

-- A branch went on from the head p_known, unless another push came since that was read: then NULL.
CREATE FUNCTION ci.push_after(p_project text, p_source text, p_branch text, p_commit text, p_attrs text[], p_known text) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_head text;
BEGIN
  PERFORM FROM ci.project WHERE name = p_project FOR NO KEY UPDATE;                         -- lock: after_order
  SELECT h.commit_id INTO v_head FROM ci.head h JOIN ci.project p ON p.id = h.project_id WHERE p.name = p_project AND h.branch = p_branch;
  IF v_head IS DISTINCT FROM p_known THEN                                                   -- fence: after_known
    RETURN NULL;
  END IF;
  RETURN ci.push(p_project, p_source, p_branch, p_commit, 0::smallint, p_attrs);
END $$;

-- The same once more, because a person wants it: what was pushed, at its commit; anything else, as its source is now.
CREATE FUNCTION ci.repeat_evaluation(p_evaluation bigint) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_old ci.evaluation; v_pushed bigint; v_id bigint;
BEGIN
  SELECT * INTO v_old FROM ci.evaluation WHERE id = p_evaluation;
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC007', format('there is no evaluation %s', p_evaluation));
  END IF;
  v_pushed := CASE WHEN v_old.pushed THEN v_old.id ELSE v_old.repeats END;
  v_id := ci.create_evaluation((SELECT name FROM ci.project WHERE id = v_old.project_id), v_old.source, v_old.branch,
    CASE WHEN v_pushed IS NOT NULL THEN v_old.commit_id END, v_old.tier, v_old.attrs, true);
  UPDATE ci.evaluation SET pull_request = v_old.pull_request, repeats = v_pushed WHERE id = v_id;
  RETURN v_id;
END $$;

-- Nothing is known of its branches any more, as on its first day.
CREATE FUNCTION ci.forget_branches(p_project int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM ci.pull_request WHERE project_id = p_project;
  DELETE FROM ci.head WHERE project_id = p_project;
  DELETE FROM ci.comparison WHERE project_id = p_project;
END $$;

-- Where a project's code is from now on.
CREATE FUNCTION ci.write_source(p_project int, p_kind text, p_url text, p_instance text, p_owner text, p_repo text, p_branch text, p_attrs text[],
    p_poll_interval interval, p_pull_requests text, p_credential text) RETURNS void LANGUAGE sql AS $$
  -- The source first, and then its branches: that is the order of a look that has ended.
  WITH before AS MATERIALIZED (SELECT s.url, s.instance, s.owner, s.repo, s.branch FROM ci.project_source s WHERE s.project_id = p_project),
       written AS (
    INSERT INTO ci.project_source AS s (project_id, kind, url, instance, owner, repo, branch, attrs, poll_interval, pull_requests, credential)
    VALUES (p_project, p_kind, p_url, p_instance, p_owner, p_repo, p_branch, coalesce(p_attrs, '{}'), p_poll_interval, p_pull_requests, p_credential)
    ON CONFLICT (project_id) DO UPDATE SET kind = EXCLUDED.kind, url = EXCLUDED.url, instance = EXCLUDED.instance, owner = EXCLUDED.owner,
      repo = EXCLUDED.repo, branch = EXCLUDED.branch, attrs = EXCLUDED.attrs, poll_interval = EXCLUDED.poll_interval,
      pull_requests = EXCLUDED.pull_requests, credential = EXCLUDED.credential, poll_at = ci.clock()
    -- The operator says the same again every few minutes: that is no reason to look.
    WHERE (s.kind, s.url, s.instance, s.owner, s.repo, s.branch, s.attrs, s.poll_interval, s.pull_requests, s.credential)
      IS DISTINCT FROM (EXCLUDED.kind, EXCLUDED.url, EXCLUDED.instance, EXCLUDED.owner, EXCLUDED.repo, EXCLUDED.branch, EXCLUDED.attrs,
                        EXCLUDED.poll_interval, EXCLUDED.pull_requests, EXCLUDED.credential)
    RETURNING s.project_id)
  -- The branches of another repository, or those that were not built before, are as old as the project is there.
  SELECT ci.forget_branches(w.project_id) FROM written w CROSS JOIN before b
  WHERE (b.url, b.instance, b.owner, b.repo, b.branch) IS DISTINCT FROM (p_url, p_instance, p_owner, p_repo, p_branch)
$$;

-- People say where a project's code is; without a URL, that it is nowhere.
CREATE FUNCTION ci.put_source(p_project text, p_kind text, p_url text, p_instance text, p_owner text, p_repo text, p_branch text, p_attrs text[],
    p_poll_interval interval, p_pull_requests text, p_credential text) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_project ci.project;
BEGIN
  SELECT * INTO v_project FROM ci.project WHERE name = p_project AND deleted_at IS NULL;
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC007', format('there is no project %s', p_project));
  END IF;
  IF v_project.k8s_uid IS NOT NULL THEN                                                     -- fence: source_keeper
    PERFORM ci.refuse_keeper('project', 'Project', p_project, NULL);
  END IF;
  IF p_url IS NULL THEN
    DELETE FROM ci.project_source WHERE project_id = v_project.id;
    PERFORM ci.forget_branches(v_project.id);
  ELSE
    PERFORM ci.write_source(v_project.id, p_kind, p_url, p_instance, p_owner, p_repo, p_branch, p_attrs, p_poll_interval, p_pull_requests, p_credential);
  END IF;
END $$;

-- As a Project says, once that generation of it is mirrored. False: another word stands.
CREATE FUNCTION ci.mirror_source(p_leader_generation bigint, p_uid text, p_generation bigint, p_project text, p_kind text, p_url text, p_instance text,
    p_owner text, p_repo text, p_branch text, p_attrs text[], p_poll_interval interval, p_pull_requests text, p_credential text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_project int;
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  SELECT id INTO v_project FROM ci.project WHERE name = p_project AND deleted_at IS NULL AND k8s_uid = p_uid
    AND k8s_generation = p_generation;                                                      -- fence: mirror_source_generation
  IF NOT FOUND THEN RETURN false; END IF;
  PERFORM ci.write_source(v_project, p_kind, p_url, p_instance, p_owner, p_repo, p_branch, p_attrs, p_poll_interval, p_pull_requests, p_credential);
  RETURN true;
END $$;

CREATE FUNCTION ci.poll_lease() RETURNS interval LANGUAGE sql IMMUTABLE AS $$ SELECT interval '2 minutes' $$;

-- The next repository to look at, for whoever asks first; until the look has ended or its time is over, nobody else's.
CREATE FUNCTION ci.claim_poll() RETURNS TABLE (project_id int, project text, url text, branch text, attrs text[], credential text)
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH due AS MATERIALIZED (
    SELECT s.project_id, p.name FROM ci.project_source s JOIN ci.project p ON p.id = s.project_id
    WHERE s.poll_at <= ci.clock() AND p.deleted_at IS NULL AND NOT p.paused
    ORDER BY s.poll_at LIMIT 1 FOR NO KEY UPDATE OF s SKIP LOCKED)                          -- lock: claim_poll
  UPDATE ci.project_source s SET poll_at = ci.clock() + ci.poll_lease() FROM due WHERE s.project_id = due.project_id
  RETURNING s.project_id, due.name, s.url, s.branch, s.attrs, s.credential
$$;

-- What a look at p_url has seen: a commit that is new is a push, unless a push was told since the look began, or the code is elsewhere
-- by now. The next look comes at a time that is not everybody's. Answers the new evaluation.
CREATE FUNCTION ci.polled(p_project int, p_url text, p_branch text, p_commit text, p_error text) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_source record; v_head ci.head;
BEGIN
  UPDATE ci.project_source s SET poll_error = left(p_error, 4000), poll_at = ci.clock() + s.poll_interval * (0.9 + 0.2 * random())
  FROM ci.project p, ci.project_source o WHERE s.project_id = p_project AND o.project_id = p_project AND p.id = p_project AND p.deleted_at IS NULL
    AND (s.branch IS NULL OR p_branch IS NULL OR s.branch = p_branch)
    AND s.url = p_url                                                                       -- fence: polled_there
  RETURNING p.name, s.url, s.attrs, o.poll_at - ci.poll_lease() AS began_at INTO v_source;
  IF NOT FOUND OR p_commit IS NULL THEN
    RETURN NULL;
  END IF;
  SELECT * INTO v_head FROM ci.head h WHERE h.project_id = p_project AND h.branch = p_branch;
  IF v_head.commit_id = p_commit THEN                                                       -- fence: polled_is_new
    RETURN NULL;
  END IF;
  IF v_head.seen_at > v_source.began_at THEN                                                -- fence: polled_meanwhile
    RETURN NULL;
  END IF;
  RETURN ci.push_after(v_source.name, v_source.url, p_branch, p_commit, v_source.attrs, v_head.commit_id);
END $$;

-- What an evaluation that goes on is of: its source's tree, and how that is evaluated. Answers the newest complete evaluation of the
-- same, if it knew all its attributes: what it found need not be looked for again. Only pushes: who asks by hand wants it looked at.
CREATE FUNCTION ci.same_tree(p_evaluation bigint, p_attempt int, p_tree text) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_this ci.evaluation; v_id bigint;
BEGIN
  UPDATE ci.evaluation SET tree = p_tree WHERE id = p_evaluation AND state = 'evaluating' AND attempt = p_attempt RETURNING * INTO v_this;
  SELECT e.id INTO v_id FROM ci.evaluation e
  WHERE e.project_id = v_this.project_id AND e.tree = p_tree AND e.state = 'complete' AND e.id <> p_evaluation AND e.attrs = v_this.attrs
    AND v_this.pushed                                                                       -- fence: reuse_pushed
    AND e.tier = v_this.tier                                                                -- fence: reuse_tier
    AND NOT EXISTS (SELECT FROM ci.evaluation_attr a WHERE a.evaluation_id = e.id AND a.error IS NOT NULL)    -- fence: reuse_whole
  ORDER BY e.id DESC LIMIT 1;
  RETURN v_id;
END $$;

-- What an evaluation of the same project found, by attribute.
CREATE FUNCTION ci.found_before(p_evaluation bigint, p_before bigint) RETURNS TABLE (attr text, drv_path text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT a.attr, j.drv_path FROM ci.evaluation e JOIN ci.evaluation b ON b.id = p_before AND b.project_id = e.project_id AND b.tier = e.tier
  JOIN ci.evaluation_attr a ON a.evaluation_id = b.id JOIN ci.job j ON j.id = a.job_id WHERE e.id = p_evaluation ORDER BY a.attr
$$;

-- How long the source itself wants to be kept.
CREATE FUNCTION ci.wish_retention(p_evaluation bigint, p_attempt int, p_retention interval) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE ci.evaluation SET retention = greatest(p_retention, interval '1 hour') WHERE id = p_evaluation AND state = 'evaluating' AND attempt = p_attempt
$$;

-- What an evaluator has to know of the project beside its evaluation: where its code is, and by which name to read it.
CREATE FUNCTION ci.evaluation_source(p_evaluation bigint) RETURNS TABLE (url text, branch text, credential text, pull_request int)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT s.url, s.branch, s.credential, e.pull_request FROM ci.evaluation e JOIN ci.project_source s ON s.project_id = e.project_id WHERE e.id = p_evaluation
$$;

DO $$
DECLARE
  v_grant record;
  v_table text;
BEGIN
  FOR v_grant IN SELECT * FROM (VALUES
    ('harmonia_evaluator', ARRAY['claim_poll', 'polled', 'same_tree', 'found_before', 'evaluation_source', 'wish_retention']),
    ('harmonia_frontend', ARRAY['push', 'push_after', 'repeat_evaluation', 'put_source', 'is_merge_queue']),
    ('harmonia_operator', ARRAY['mirror_source'])) x (role, names) LOOP
    EXECUTE (SELECT string_agg(format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::regprocedure, v_grant.role), '; ')
             FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname = ANY (v_grant.names));
  END LOOP;
  FOREACH v_table IN ARRAY ARRAY['project_source', 'head'] LOOP
    EXECUTE format('GRANT SELECT ON ci.%I TO harmonia_operator, harmonia_frontend', v_table);
  END LOOP;
  GRANT SELECT (pushed, pull_request, superseded_by, tree, retention, repeats) ON ci.evaluation TO harmonia_operator, harmonia_frontend;
END $$;
