-- Who may call what. Nobody but the owner touches a table, except that people's pages and the operator may read, and
-- then no secret. Builders and evaluators run foreign code: functions only.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ci FROM PUBLIC;
ALTER DEFAULT PRIVILEGES IN SCHEMA ci REVOKE ALL ON FUNCTIONS FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON FUNCTIONS FROM PUBLIC;
GRANT USAGE ON SCHEMA ci TO harmonia_operator, harmonia_signer, harmonia_frontend, harmonia_evaluator, harmonia_builder;

DO $$
DECLARE
  v_all text := 'harmonia_operator, harmonia_signer, harmonia_frontend, harmonia_evaluator';
  v_grant record;
  v_table text;
BEGIN
  FOR v_grant IN SELECT * FROM (VALUES
    ('harmonia_builder', ARRAY['register', 'heartbeat', 'claim', 'closure', 'give_back', 'log_append', 'start_upload', 'fail', 'input_missing', 'deregister']),
    ('harmonia_evaluator', ARRAY['create_evaluation', 'claim_evaluation', 'keep_evaluation', 'release_evaluations', 'evaluation_token', 'known', 'known_closure', 'record_paths', 'ingest', 'complete_evaluation', 'end_evaluation']),
    ('harmonia_signer', ARRAY['check_claim', 'check_claims', 'recorded', 'texts', 'realised', 'realised_at', 'remember_proofs', 'check_evaluation', 'accept_sources', 'accept', 'unpublished', 'finish', 'give_up',
                              'missing_reports', 'settle_missing', 'published', 'nodes_named', 'to_forget', 'forget']),
    ('harmonia_frontend', ARRAY['create_evaluation', 'end_evaluation', 'put_project', 'remove_project', 'rebuild', 'rebuild_failed', 'cancel', 'drain', 'resume', 'why',
                                'create_token', 'revoke_token', 'token_scope', 'state_of']),
    ('harmonia_operator', ARRAY['end_evaluation', 'put_project', 'remove_project', 'put_pool', 'remove_pool', 'mirror_project', 'unmirror_project', 'mirror_pool', 'unmirror_pool', 'note_pool',
                                'pool_counts', 'demand', 'project_counts', 'drain', 'resume', 'drain_idle', 'why', 'create_token', 'revoke_token', 'token_scope']),
    (v_all, ARRAY['resolve', 'beat', 'leave', 'healthy_replicas', 'lock_key', 'lead', 'leader', 'reap', 'fail_unsupported', 'decay', 'prune', 'retain',
                  'end_long_transactions', 'audit', 'clock', 'moment'])) x (role, names) LOOP
    EXECUTE (SELECT string_agg(format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::regprocedure, v_grant.role), '; ')
             FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname = ANY (v_grant.names));
  END LOOP;
  FOR v_table IN SELECT tablename FROM pg_tables WHERE schemaname = 'ci' LOOP
    EXECUTE format('GRANT SELECT (%s) ON ci.%I TO harmonia_operator, harmonia_frontend', (
      SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
      WHERE attrelid = format('ci.%I', v_table)::regclass AND attnum > 0 AND NOT attisdropped AND attname <> 'secret_hash'), v_table);
  END LOOP;
END $$;
