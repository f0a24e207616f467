//! Builders and signers of earlier releases on today's schema: what they ask is still answered, in the shape that they read.

use std::collections::BTreeMap;

use harmonia_tests::farm::Farm;
use sqlx::{Column, Connection, Executor, PgConnection, SqlSafeStr, Statement, TypeInfo};

/// By release. The supported skew is one: what the release before the last asked may go.
const RELEASES: &[(&str, &str)] = &[("0.1.0", include_str!("../../data/calls/0.1.0.tsv"))];

#[tokio::test]
async fn what_the_previous_release_asks_is_answered_in_the_shape_that_it_reads() {
    let farm = Farm::new().await;
    let mut connections = BTreeMap::new();
    for (release, calls) in RELEASES {
        for line in calls.lines().filter(|line| !line.starts_with('#')) {
            let [group, sql, columns] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
            if !connections.contains_key(group) {
                let login = farm.database.make_login(group).await;
                connections.insert(group, PgConnection::connect(&login.direct_url).await.unwrap());
            }
            let connection = connections.get_mut(group).unwrap();
            let prepared = connection.prepare(sql.into_sql_str()).await;
            let prepared = prepared.unwrap_or_else(|error| panic!("{release}: {sql}: {error}"));
            let answered: BTreeMap<&str, String> = prepared
                .columns()
                .iter()
                .map(|column| (column.name(), column.type_info().name().to_ascii_lowercase()))
                .collect();
            for column in columns.split(' ') {
                let (name, kind) = column.split_once(':').unwrap();
                assert_eq!(answered.get(name).map(String::as_str), Some(kind), "{release}: {sql}: {name}");
            }
            // Preparing says nothing about rights.
            let function = sql.split("ci.").nth(1).and_then(|rest| rest.split('(').next()).unwrap();
            let allowed: bool = sqlx::query_scalar(
                "SELECT bool_and(has_function_privilege($1, oid, 'EXECUTE')) FROM pg_proc WHERE pronamespace = 'ci'::regnamespace AND proname = $2",
            )
            .bind(group)
            .bind(function)
            .fetch_one(&farm.database.admin())
            .await
            .unwrap();
            assert!(allowed, "{release}: {group} may not call {function}");
        }
    }
}
