//! The tables of settings, compared with the setters of the public API.

/// The heading of a table, and the type with the setters that it lists.
const TABLES: [(&str, &str); 3] = [
    ("Redlock::builder()", "tower_redlock::RedlockBuilder"),
    ("RedlockLayer", "tower_redlock::RedlockLayer<D>"),
    ("IdempotencyLayer", "tower_redlock::IdempotencyLayer"),
];

/// Not settings: nodes for tests.
const NO_SETTINGS: [&str; 2] = ["scripted", "traces"];

/// Settings of the builder that no environment variable can have; `urls` has one, which may have groups too.
const NO_VARIABLES: [&str; 10] = [
    "url",
    "pool_config",
    "pool",
    "embedded",
    "group",
    "named_group",
    "node_group",
    "credentials",
    "retry",
    "runtime",
];

/// The setters and variables that the chapter lacks, and the names in it that are none.
///
/// `api` is the text of the public API: one line for each function.
pub(crate) fn differences(chapter: &str, api: &str) -> Vec<String> {
    let mut tables = Vec::from(TABLES.map(|(heading, of)| (heading, setters(api, of))));
    let mut variables = tables[0].1.clone();
    variables.retain(|name| !NO_VARIABLES.contains(&name.as_str()));
    let variables = variables
        .iter()
        .map(|name| format!("REDLOCK_{}", name.to_uppercase()));
    tables.push(("RedlockConfig", variables.collect()));
    let mut found = Vec::new();
    for (heading, names) in tables {
        let listed = listed(chapter, heading);
        let missing = names.iter().filter(|name| !listed.contains(name));
        found.extend(missing.map(|name| format!("{heading} lacks `{name}`")));
        let unknown = listed.iter().filter(|name| !names.contains(name));
        found.extend(unknown.map(|name| format!("{heading} lists `{name}`, which is no setting")));
    }
    found
}

/// The names in the first column of the table below a heading.
fn listed(chapter: &str, heading: &str) -> Vec<String> {
    let Some((_, section)) = chapter.split_once(&format!("# {heading}\n")) else {
        return Vec::new();
    };
    let section = section.split("\n# ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let columns = rows.filter_map(|row| row.split('|').nth(1));
    columns
        .flat_map(|column| column.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

/// The public methods of a type that take `self` by value and something to set.
fn setters(api: &str, of: &str) -> Vec<String> {
    let method = format!("pub fn {of}::");
    let methods = api.lines().filter_map(|line| line.strip_prefix(&method));
    let names = methods.filter_map(|method| Some(method.split_once("(self, ")?.0));
    let names = names.filter(|name| !NO_SETTINGS.contains(name));
    names.map(str::to_owned).collect()
}

#[test]
fn planted_differences_are_found() {
    let chapter = "# Redlock::builder()\n\n| `url`, `gone` | x |\n\n# RedlockConfig\n\n| `REDLOCK_GONE` | x |\n";
    let api = "\
pub fn tower_redlock::RedlockBuilder::build(self) -> X
pub fn tower_redlock::RedlockBuilder::url(self, X) -> Self
pub fn tower_redlock::RedlockBuilder::ttl(self, X) -> Self
pub fn tower_redlock::RedlockLayer<D>::wait(self, X) -> Self
";
    let expected = [
        "Redlock::builder() lacks `ttl`",
        "Redlock::builder() lists `gone`, which is no setting",
        "RedlockLayer lacks `wait`",
        "RedlockConfig lacks `REDLOCK_TTL`",
        "RedlockConfig lists `REDLOCK_GONE`, which is no setting",
    ];
    assert_eq!(differences(chapter, api), expected);
}
