//! Builders, signers and evaluators of earlier releases on today's schema: what they ask is still answered, in the shape that they
//! read, and comes to the same.

use std::collections::BTreeMap;

use harmonia_tests::farm::{Farm, SYSTEM};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Column, Connection, Executor, PgConnection, SqlSafeStr, Statement, TypeInfo};

struct Release {
    name: &'static str,
    /// What it asks.
    calls: &'static str,
    /// A day of it.
    life: &'static str,
}

/// The supported skew is one: what the release before the last asked may go.
const RELEASES: &[Release] = &[Release {
    name: "0.1.0",
    calls: include_str!("../../data/calls/0.1.0.tsv"),
    life: include_str!("../../data/calls/0.1.0.life.tsv"),
}];

fn lines(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.lines().filter(|line| !line.starts_with('#'))
}

/// The function that a statement calls.
fn function(sql: &str) -> &str {
    sql.split("ci.").nth(1).and_then(|rest| rest.split('(').next()).unwrap()
}

#[tokio::test]
async fn what_the_previous_release_asks_is_answered_in_the_shape_that_it_reads() {
    let farm = Farm::new().await;
    let mut connections = BTreeMap::new();
    for Release { name: release, calls, .. } in RELEASES {
        for line in lines(calls) {
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
            let allowed: bool = sqlx::query_scalar(
                "SELECT bool_and(has_function_privilege($1, oid, 'EXECUTE')) FROM pg_proc WHERE pronamespace = 'ci'::regnamespace AND proname = $2",
            )
            .bind(group)
            .bind(function(sql))
            .fetch_one(&farm.database.admin())
            .await
            .unwrap();
            assert!(allowed, "{release}: {group} may not call {}", function(sql));
        }
    }
}

/// One that plays a release: its logins, and what it remembers of answers.
struct Actor {
    farm: Farm,
    calls: BTreeMap<(&'static str, &'static str), &'static str>,
    connections: BTreeMap<&'static str, PgConnection>,
    kept: BTreeMap<&'static str, String>,
}

impl Actor {
    async fn new(release: &Release) -> Actor {
        let farm = Farm::new().await;
        farm.project("main").await;
        let pool = farm.pool("pool", &[SYSTEM], 1).await;
        let mut connections = BTreeMap::new();
        for group in ["harmonia_builder", "harmonia_signer", "harmonia_evaluator"] {
            let url = match group {
                "harmonia_builder" => pool.login.direct_url.clone(),
                _ => farm.database.make_login(group).await.direct_url,
            };
            connections.insert(group, PgConnection::connect(&url).await.unwrap());
        }
        let call = |line: &'static str| {
            let (group, rest) = line.split_once('\t').unwrap();
            let sql = rest.split('\t').next().unwrap();
            ((group, function(sql)), sql)
        };
        Actor { farm, calls: lines(release.calls).map(call).collect(), connections, kept: BTreeMap::new() }
    }

    fn filled(&self, text: &str) -> String {
        self.kept.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!(":{name}"), value))
    }

    /// Makes one call and compares what it reads of the first row.
    async fn play(&mut self, line: &'static str) {
        let [group, function, arguments, reads] =
            line.split('\t').chain(["", "", ""]).take(4).collect::<Vec<_>>()[..]
        else {
            panic!("{line}")
        };
        if group == "resolver" {
            return self.farm.settle().await;
        }
        let arguments: Vec<String> = arguments.split('|').map(|argument| self.filled(argument)).collect();
        let numbered = arguments.iter().enumerate().rev();
        let sql = numbered.fold(self.calls[&(group, function)].to_owned(), |sql, (at, argument)| {
            sql.replace(&format!("${}", at + 1), argument)
        });
        let connection = self.connections.get_mut(group).unwrap();
        let rows = sqlx::query_scalar::<_, String>(AssertSqlSafe(format!(
            "SELECT to_jsonb(x)::text FROM ({sql}) x"
        )));
        let row = rows.fetch_optional(connection).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
        let row: Value = row.map(|row| serde_json::from_str(&row).unwrap()).unwrap_or_default();
        for read in reads.split(' ').filter(|read| !read.is_empty()) {
            let (column, wanted) = read.split_once(['>', '=']).unwrap();
            let value = row[column].as_str().map_or_else(|| row[column].to_string(), str::to_owned);
            if read.as_bytes()[column.len()] == b'>' {
                self.kept.insert(wanted, value);
            } else {
                assert_eq!(value, self.filled(wanted), "{sql}: {column} of {row}");
            }
        }
    }
}

#[tokio::test]
async fn a_day_of_the_previous_release_ends_as_it_did() {
    for release in RELEASES {
        let mut actor = Actor::new(release).await;
        for line in lines(release.life) {
            actor.play(line).await;
        }
        let [job, top] = ["job", "top"].map(|name| actor.kept[name].parse().unwrap());
        assert_eq!(actor.farm.state(job).await, "succeeded", "{}", release.name);
        assert_eq!(actor.farm.state(top).await, "failed", "{}", release.name);
        actor.farm.assert_sound().await;
    }
}
