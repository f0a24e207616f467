//! A password that changes while a process runs.

use harmonia_queue::{Db, people};
use harmonia_tests::farm::Farm;

#[tokio::test]
async fn new_connections_are_made_with_the_new_password() {
    let farm = Farm::new().await;
    let login = farm.database.make_login("harmonia_frontend").await;
    let db = Db::direct(&login.direct_url, 1).unwrap();
    let alone = db.alone();
    farm.database.execute(&format!("ALTER ROLE {} PASSWORD 'another'", login.role)).await;
    assert!(people::token_scope(&db, "").await.is_err(), "the old password is good for new connections");
    db.renew(&login.direct_url.replace(&login.password, "another")).unwrap();
    assert!(people::token_scope(&db, "").await.is_ok());
    assert!(people::token_scope(&alone, "").await.is_ok());
}
