//! The statements in the chapter on fencing change and return what the comments behind them say.

use rusqlite::Connection;

use crate::recipes::blocks;

const CHAPTER: &str = include_str!("../../docs/what_is_this_lock_for.md");

// Rules: lock.storage
#[test]
fn statements_that_raise_the_fence_before_they_read_refuse_the_late_write() {
    let scenes = blocks(CHAPTER, "sql");
    let scene = scenes.iter().find(|block| block.contains("CREATE TABLE"));
    let database = Connection::open_in_memory().unwrap();
    let mut compared = 0;
    for line in scene
        .unwrap()
        .lines()
        .filter(|line| line.contains(';') && !line.starts_with("--"))
    {
        let (statement, comment) = line.split_once(';').unwrap();
        let told = comment.trim().trim_start_matches("-- ");
        let outcome = if statement.starts_with("SELECT") {
            let value: i64 = database.query_row(statement, [], |row| row.get(0)).unwrap();
            value.to_string()
        } else {
            match database.execute(statement, []).unwrap() {
                1 => "1 row".to_owned(),
                rows => format!("{rows} rows"),
            }
        };
        if !told.is_empty() {
            assert!(told.starts_with(&outcome), "{line}: {outcome}");
            compared += 1;
        }
    }
    assert_eq!(compared, 5);
}
