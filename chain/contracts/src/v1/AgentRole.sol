// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// Access control: one owner appoints agents (ERC-3643: operators of a permissioned token).
abstract contract AgentRole {
    address public owner;
    mapping(address account => bool) private agents;

    event OwnershipTransferred(address indexed previousOwner, address indexed newOwner);
    event AgentAdded(address indexed agent);
    event AgentRemoved(address indexed agent);

    error OnlyOwner();
    error OnlyAgent();
    error ZeroAddress();

    modifier onlyOwner() {
        if (msg.sender != owner) revert OnlyOwner();
        _;
    }

    modifier onlyAgent() {
        if (!agents[msg.sender]) revert OnlyAgent();
        _;
    }

    constructor() {
        owner = msg.sender;
        agents[msg.sender] = true;
        emit OwnershipTransferred(address(0), msg.sender);
        emit AgentAdded(msg.sender);
    }

    function isAgent(address account) external view returns (bool) {
        return agents[account];
    }

    function addAgent(address account) external onlyOwner {
        _addAgent(account);
    }

    function removeAgent(address account) external onlyOwner {
        agents[account] = false;
        emit AgentRemoved(account);
    }

    function transferOwnership(address newOwner) external onlyOwner {
        if (newOwner == address(0)) revert ZeroAddress();
        emit OwnershipTransferred(owner, newOwner);
        owner = newOwner;
    }

    function _addAgent(address account) internal {
        if (account == address(0)) revert ZeroAddress();
        agents[account] = true;
        emit AgentAdded(account);
    }
}
